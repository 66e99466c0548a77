"""The interface of a backend, which owns model and optimizer, in one process or on every rank of a group.

Each rank runs the same commands in the same order with the same tables. It takes every `world`-th micro-batch of a
minibatch, and all ranks take equally many (`Learner` adds empty ones). Losses are weighted over the whole minibatch, so
gradients are *summed* over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.names import Names
from schemas.recipe.training import Trainer

Which = Literal["policy", "reference"]

#: Puts a checkpoint's files of these names into its folder. Every rank calls it, for those that it reads itself.
Fetch = Callable[[Collection[str]], None]

#: Maps logprobs (with gradient) and entropies of consecutive counted tokens, `layout.where[part]`, to the rows of
#: `objective.STATS`: each token's column depends on that token alone.
TokenLoss = Callable[[Float[Tensor, " t"], Float[Tensor, " t"], slice], Float[Tensor, "K t"]]


class Scores(NamedTuple):
    """Results of one forward pass for the counted tokens, in nats."""

    logprobs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]  # of the distribution at each token; without gradient


class TokenStats(NamedTuple):
    """Per-token quantities of a minibatch, one row per quantity; see `objective.STATS`."""

    values: Float[Tensor, "K T"]
    samples: Int[Tensor, " T"]


def all_there(names: Collection[str]) -> None:
    """The `Fetch` of a folder that holds the whole checkpoint."""


@dataclass(frozen=True)
class Progress:
    """Training progress, saved with every checkpoint."""

    step: int = 0  # optimizer steps since version 0, skipped and empty ones included
    skipped_in_row: int = 0


@runtime_checkable
class Backend(Protocol):
    """Model and optimizer. `rank` and `world` determine this process's share of the micro-batches."""

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
        """Use AdamW's options and the maximal gradient norm of `settings` from now on, and change nothing else."""
        ...

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        """One forward and backward pass, which accumulates the gradient of Σ_t weights[t] · loss(…)[0, t].

        `last` marks the minibatch's last pass on this rank: sharded backends reduce gradients with it. `weights` may be
        on the host or on `device`. Returns the rows of `loss` on `device`, without gradient, not waiting for it.
        """
        ...

    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        """Logprobs and entropies of the counted tokens, without gradient and without waiting for the device.

        Unless this is the `last` pass, the next call must be another pass of the same policy.
        """
        ...

    def step(self, lr: float, wanted: bool) -> float:
        """Clip and apply the accumulated gradient, then clear it; returns its norm before clipping.

        The gradient is applied only if the step is `wanted` and the norm is finite.
        """
        ...

    def gather(self, stats: TokenStats) -> TokenStats:
        """The statistics of all ranks, on the CPU: the same on every rank, in a fixed order."""
        ...

    def names(self) -> Names:
        """How the policy's tensors correspond to those of the checkpoint that it was loaded from."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the model's names: weights in `model.dtype`, as they are published, and buffers.

        One at a time, on `device`; every rank takes part.
        """
        ...

    def save_checkpoint(self, folder: Path, progress: Progress) -> Mapping[str, str]:
        """Write model, optimizer, RNG and progress. Every rank takes part.

        Returns, on rank 0, the SHA-256 by name of the files that were hashed during writing.
        """
        ...

    def load_checkpoint(self, folder: Path, fetch: Fetch = all_there) -> Progress:
        """Restore all of these bitwise, into a policy that was loaded before. `fetch`: see `load_parameters`."""
        ...
