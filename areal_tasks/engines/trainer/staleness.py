"""The staleness of the tokens that an iteration trains on, and the check that none is older than η allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from areal_tasks.data.batching import Sequences
from schemas.errors import UserError

#: With fewer tokens of the trainer's own version, the agreement of server and trainer is not measured.
LEAST_COMPARED: Final = 256


@dataclass(frozen=True)
class Staleness:
    """Per token of a batch: by how many versions the weights that sampled it are older than those that are trained, and
    whether still older weights computed some of its KV cache. 0 and False at tokens that do not count.
    """

    lag: Int[Tensor, " N"]
    stale_kv: Bool[Tensor, " N"]

    @property
    def comparable(self) -> Bool[Tensor, " N"]:
        """The tokens that the trainer's own weights sampled, with their own KV cache."""
        return (self.lag == 0) & ~self.stale_kv


def make_staleness(
    versions: Int[Tensor, " N"], stale_kv: Bool[Tensor, " N"], counted: Bool[Tensor, " N"], version: int
) -> Staleness:
    """The staleness of tokens sampled by `versions`, for a step of the policy `version`."""
    return Staleness(torch.where(counted, version - versions, 0), stale_kv & counted)


def check_lag(staleness: Staleness, sequences: Sequences, ids: pa.Array, version: int, bound: float) -> None:
    """Refuse tokens that are more than `bound` versions older than `version`.

    Raises:
        UserError: names the sample of the oldest token, its version, and the bound.
    """
    if not len(staleness.lag) or (lag := int(staleness.lag.max())) <= bound:
        return
    owners = torch.arange(len(sequences.lengths)).repeat_interleave(sequences.lengths)
    sample = ids[int(owners[int(staleness.lag.argmax())])].as_py()
    raise UserError(
        f"sample {sample} has a token of version {version - lag}, {lag} versions older than version {version}, which "
        f"would train on it; rollout.max_head_offpolicyness (η) allows {bound:g}. No step was made. Set η to {lag} at "
        "least, or rollout.bound to admission, under which slow groups may exceed it."
    )


def staleness_metrics(staleness: Staleness, trained: Bool[Tensor, " N"]) -> dict[str, float]:
    """Over the `trained` tokens: mean and greatest lag, in versions, and the share with a stale KV cache.

    Empty without tokens.
    """
    lag = staleness.lag[trained].double()
    if not len(lag):
        return {}
    return {
        "lag_mean": float(lag.mean()),
        "lag_max": float(lag.max()),
        "stale_kv": float(staleness.stale_kv[trained].double().mean()),
    }
