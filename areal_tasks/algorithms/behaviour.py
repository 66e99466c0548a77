"""Behaviour weights π_proximal / π_behaviour: they correct the policy loss of tokens sampled by another policy.

The decoupled objective of AReaL (arXiv:2505.24298), §5.2, after Hilton et al. (arXiv:2110.00641): the clip is
relative to the proximal policy, and this weight, without gradient, corrects for the policy that sampled. As in
`losses`, tensors hold the generated tokens of the samples, concatenated: T = Σ lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_tasks.algorithms.log_ratios import MAX_LOG_RATIO, bounded


@dataclass(frozen=True)
class Bound:
    """The treatment of large and small weights.

    `cap`: min(w, high), truncated importance sampling (E. L. Ionides, J. Comput. Graph. Stat. 17(2), 2008).
    `mask`: w within [low, high], else 0: the token has no policy gradient, as in IcePop (arXiv:2510.18855; .5 and 5
    there). A KL term of the loss, which is no function of w, keeps its own.
    """

    how: Literal["cap", "mask"]
    high: float
    low: float = 0.0  # of `mask` alone


class BehaviourWeights(NamedTuple):
    """The factors of the tokens' policy losses."""

    applied: Float[Tensor, "T"]
    bounded: Bool[Tensor, "T"]  # the bound changed the weight


def behaviour_weights(log_ratios: Float[Tensor, "T"], bound: Bound, limit: float = MAX_LOG_RATIO) -> BehaviourWeights:
    """The exponentials of log π_proximal / π_behaviour under `bound`; no gradient. 1 where both agree, NaN where NaN.

    `log_ratios` are in nats, of tokens or (`sequence_log_ratios`) of sequences, and bounded to `limit` (`log_ratios`).
    """
    weights = torch.exp(bounded(log_ratios, limit)).detach()
    if bound.how == "cap":
        return BehaviourWeights(weights.clamp(max=bound.high), weights > bound.high)
    outside = (weights > bound.high) | (weights < bound.low)
    return BehaviourWeights(weights.masked_fill(outside, 0.0), outside)


def sequence_log_ratios(log_ratios: Float[Tensor, "T"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "T"]:
    """For each token the log-ratio of its whole sequence, in nats: the sum over the sequence's generated tokens.

    The importance weight of a sequence is the product of its tokens' (Hilton et al., §2). Summed in float64.
    """
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=log_ratios.device)
    return sums.index_add(0, owners, log_ratios.double())[owners].to(log_ratios.dtype)


def effective_sample_size(total: float, squares: float, count: int) -> float:
    """(Σ w)² / (n · Σ w²), as a share of n: 1 if all weights are equal, 1/n if only one is not 0, 0 if all are 0.

    Kong (1992); `total` is Σ w, `squares` is Σ w².
    """
    return min(total * total / (count * squares), 1.0) if squares else 0.0
