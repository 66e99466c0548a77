"""What a backend is: the owner of model and optimizer, on one process or on every rank of a torchrun group.

Each rank runs the same commands in the same order; of an iteration's micro-batches it takes every `world`-th. Losses
are weighted over the whole minibatch, so gradients are *summed* over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import Layout

Which = Literal["policy", "reference"]


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

    def load(self, weights: Path, seed: int) -> None:
        """Load the Hugging Face folder `weights` as the policy, with a fresh optimizer."""
        ...

    def load_reference(self, weights: Path) -> None:
        """Load the frozen reference policy."""
        ...

    def forward(self, layout: Layout, temperature: float) -> Scores:
        """Score the tokens that count under the policy; `logprobs` carries its gradient."""
        ...

    def score(self, layout: Layout, temperature: float, which: Which) -> Scores:
        """The same without gradient."""
        ...

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of `loss` to what has accumulated."""
        ...

    def step(self, lr: float, wanted: bool) -> float:
        """Clip and apply the accumulated gradient, then clear it; returns its norm before clipping.

        Nothing is applied unless the step is `wanted` and the norm finite.
        """
        ...

    def gather(self, stats: TokenStats) -> TokenStats:
        """The statistics of all ranks."""
        ...

    def save_weights(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, without tokenizer."""
        ...

    def save_checkpoint(self, folder: Path, progress: Progress) -> None:
        """Write model, optimizer, RNG and progress."""
        ...

    def load_checkpoint(self, folder: Path) -> Progress:
        """Restore them, bit by bit, over a policy that was loaded before."""
        ...
