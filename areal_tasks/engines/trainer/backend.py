"""The types that backends (`local`, `fsdp2`, `deepspeed_backend`) receive and return."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

Which = Literal["policy", "reference"]

#: Fetches files of a checkpoint, by name, into its folder. Every rank calls it for those that it reads itself.
Fetch = Callable[[Collection[str]], None]

#: Maps logprobs (with gradient) and entropies of consecutive counted tokens, `layout.where[part]`, to the rows of
#: `objective.STATS`: each token's column depends on that token alone.
TokenLoss = Callable[[Float[Tensor, " t"], Float[Tensor, " t"], slice], Float[Tensor, "K t"]]


class Scores(NamedTuple):
    """Results of one forward pass for the counted tokens, in nats."""

    logprobs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]  # of the distribution at each token; without gradient


def all_there(names: Collection[str]) -> None:
    """The `Fetch` of a folder that holds the whole checkpoint."""


@dataclass(frozen=True)
class Progress:
    """Training progress, saved with every checkpoint."""

    step: int = 0  # optimizer steps since version 0, skipped and empty ones included
    skipped_in_row: int = 0
