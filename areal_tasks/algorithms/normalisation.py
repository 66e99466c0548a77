"""Rewards and advantages relative to their group or batch.

Groups are found by id, never by position. Standard deviations are of the population (÷ n): a group is all there
is of its prompt, and n = 1 needs no special case. EPS is added to the deviation; where all values are equal the
result is exactly 0, whatever rounding does to the mean. Sums are made in float64.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RewardNorm = Literal["mean_std", "mean", "none"]

EPS: Final = 1e-6


def group_rewards(
    rewards: Float[Tensor, "N"], groups: Int[Tensor, "N"], kept: Bool[Tensor, "N"], how: RewardNorm
) -> Float[Tensor, "N"]:
    """(r - mean) / (std + EPS) over the kept samples of each group: DeepSeekMath (arXiv:2402.03300), §4.1.2.

    `mean` leaves out the division (Dr. GRPO, arXiv:2503.20783, §3.2), `none` leaves the reward as it is.
    Samples that are not kept get 0 and count for nothing, even where their reward is NaN.
    """
    result = torch.zeros_like(rewards)
    values = rewards[kept]
    result[kept] = values if how == "none" else _standardise(values, groups[kept], scale=how == "mean_std")
    return result


def whiten(values: Float[Tensor, "T"], groups: Int[Tensor, "T"] | None) -> Float[Tensor, "T"]:
    """(v - mean) / (std + EPS) over each group's values, or over all of them where `groups` is None."""
    one_group = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    return _standardise(values, one_group if groups is None else groups, scale=True)


def _standardise(values: Float[Tensor, "T"], groups: Int[Tensor, "T"], scale: bool) -> Float[Tensor, "T"]:
    ids, index = torch.unique(groups, return_inverse=True)
    wide = values.double()
    centred = wide - _mean(wide, index, len(ids))[index]
    if scale:
        centred = centred / (_mean(centred.square(), index, len(ids)).sqrt() + EPS)[index]
    return torch.where(_equal(wide, index, len(ids))[index], 0.0, centred).to(values.dtype)


def _mean(values: Float[Tensor, "T"], index: Int[Tensor, "T"], groups: int) -> Float[Tensor, "G"]:
    sums = values.new_zeros(groups).index_add(0, index, values)
    return sums / torch.bincount(index, minlength=groups)


def _equal(values: Float[Tensor, "T"], index: Int[Tensor, "T"], groups: int) -> Bool[Tensor, "G"]:
    """Whether all values of a group are the same."""
    highest = values.new_zeros(groups).scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = values.new_zeros(groups).scatter_reduce(0, index, values, "amin", include_self=False)
    return highest == lowest
