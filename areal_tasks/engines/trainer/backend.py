"""What a backend is: the owner of model and optimizer, on one process or on every rank of a torchrun group.

Each rank runs the same commands in the same order with the same tables; of an iteration's micro-batches it takes every
`world`-th, and as many as the others (`Learner` adds empty ones). Losses are weighted over the whole minibatch, so
gradients are *summed* over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.names import Names
from schemas.recipe.sections import Trainer

Which = Literal["policy", "reference"]

#: From the logprobs (with gradient) and the entropies of a run of counted tokens, those of `layout.where[part]`, to the
#: rows of `objective.STATS`, token by token: a token's column depends on nothing but that token.
TokenLoss = Callable[[Float[Tensor, " t"], Float[Tensor, " t"], slice], Float[Tensor, "K t"]]


class Scores(NamedTuple):
    """What one forward pass says of the tokens that count, in nats."""

    logprobs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]  # of the distribution each was drawn from; carries no gradient


class TokenStats(NamedTuple):
    """Per-token quantities of a minibatch, a row each; see `objective.STATS`."""

    values: Float[Tensor, "K T"]
    samples: Int[Tensor, " T"]


@dataclass(frozen=True)
class Progress:
    """Where training stands; saved with every checkpoint."""

    step: int = 0  # optimizer steps since version 0, skipped and empty ones included
    skipped_in_row: int = 0


@runtime_checkable
class Backend(Protocol):
    """Model and optimizer. `rank` and `world` say which share of the micro-batches is this process's."""

    rank: int
    world: int
    device: torch.device  # where the model computes

    def load(self, weights: Path, seed: int) -> None:
        """Load the Hugging Face folder `weights` as the policy, with a fresh optimizer."""
        ...

    def load_reference(self, weights: Path) -> None:
        """Load the frozen reference policy."""
        ...

    def use(self, settings: Trainer) -> None:
        """From now on take steps with AdamW's options and the gradient norm of `settings`, and all else as it is."""
        ...

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        """One forward and backward pass: adds the gradient of Σ_t weights[t] · loss(…)[0, t] to what has accumulated.

        `last` marks the minibatch's last pass on this rank: sharded backends reduce gradients with it. `weights` may
        be on the host or on `device`. Returns the rows of `loss`, on `device`, without gradient and without waiting.
        """
        ...

    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        """Logprobs and entropies of the tokens that count, without gradient and without waiting for the device.

        Unless it is the `last` pass, another of the same policy follows before anything else is asked.
        """
        ...

    def step(self, lr: float, wanted: bool) -> float:
        """Clip and apply the accumulated gradient, then clear it; returns its norm before clipping.

        Nothing is applied unless the step is `wanted` and the norm finite.
        """
        ...

    def gather(self, stats: TokenStats) -> TokenStats:
        """The statistics of all ranks, on the CPU: the same on every rank, in a fixed order."""
        ...

    def names(self) -> Names:
        """How the policy's tensors correspond to those of the checkpoint that it was loaded from."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the model's names: weights in the dtype they are published in (`model.dtype`), buffers.

        One at a time, on `device`; every rank takes part.
        """
        ...

    def save_checkpoint(self, folder: Path, progress: Progress) -> Mapping[str, str]:
        """Write model, optimizer, RNG and progress. Every rank takes part.

        Returns, on rank 0, the SHA-256 of files that were hashed while they were written, by name.
        """
        ...

    def load_checkpoint(self, folder: Path) -> Progress:
        """Restore them, bit by bit, over a policy that was loaded before."""
        ...
