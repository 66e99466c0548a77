"""Rewards and advantages relative to their group or batch.

Groups are identified by id, never by position. The standard deviation is by default that of the sample (÷ n-1), as in
TRL (`rewards.std`, + 1e-4), verl (`torch.std`, + 1e-6) and AReaL (`std_unbiased`, + 1e-5). That of the population (÷ n)
is smaller, so that advantages are √(n/(n-1)) times as large: 1.41 times at n = 2. EPS is added to the deviation. If all
values of a group are equal, or there is one, the result is exactly 0, regardless of the rounding of the mean. Sums are
in float64.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RewardNorm = Literal["mean_std", "mean_batch_std", "mean", "none"]

EPS: Final = 1e-6


def group_rewards(
    rewards: Float[Tensor, "N"],
    groups: Int[Tensor, "N"],
    kept: Bool[Tensor, "N"],
    how: RewardNorm,
    unbiased: bool = True,
) -> Float[Tensor, "N"]:
    """(r - mean of its group) / (std + EPS) over the kept samples: DeepSeekMath (arXiv:2402.03300), §4.1.2.

    `mean_std` divides by the deviation of the group's rewards; `mean_batch_std` by that of all rewards, so that groups
    keep their weights (Lite PPO, arXiv:2508.08221; TRL's `scale_rewards="batch"`); `mean` omits the division
    (Dr. GRPO, arXiv:2503.20783, §3.2), `none` leaves the reward unchanged. Samples that are not kept get 0 and are
    ignored, even if their reward is NaN.
    """
    result = torch.zeros_like(rewards)
    values, members = rewards[kept], groups[kept]
    scales = {"mean_std": members, "mean_batch_std": torch.zeros_like(members), "mean": None}
    result[kept] = values if how == "none" else _standardise(values, members, scales[how], unbiased)
    return result


def whiten(values: Float[Tensor, "T"], groups: Int[Tensor, "T"] | None, unbiased: bool = True) -> Float[Tensor, "T"]:
    """(v - mean) / (std + EPS) over each group's values, or over all values if `groups` is None."""
    members = torch.zeros(values.shape, dtype=torch.int64, device=values.device) if groups is None else groups
    return _standardise(values, members, members, unbiased)


def _standardise(
    values: Float[Tensor, "T"], groups: Int[Tensor, "T"], scale: Int[Tensor, "T"] | None, unbiased: bool
) -> Float[Tensor, "T"]:
    """Values minus the mean of their group, divided by the deviation of those with the same `scale`, if given."""
    ids, index = torch.unique(groups, return_inverse=True)
    wide = values.double()
    centred = wide - _mean(wide, index, len(ids))[index]
    if scale is not None:
        centred = centred / (_deviation(wide, scale, unbiased) + EPS)
    return torch.where(_equal(wide, index, len(ids))[index], 0.0, centred).to(values.dtype)


def _deviation(values: Float[Tensor, "T"], groups: Int[Tensor, "T"], unbiased: bool) -> Float[Tensor, "T"]:
    """For each value, the standard deviation of its group; 0 for a single one."""
    ids, index = torch.unique(groups, return_inverse=True)
    counts = torch.bincount(index, minlength=len(ids))
    squares = (values - _mean(values, index, len(ids))[index]).square()
    sums = values.new_zeros(len(ids)).index_add(0, index, squares)
    return (sums / (counts - int(unbiased)).clamp(min=1)).sqrt()[index]


def _mean(values: Float[Tensor, "T"], index: Int[Tensor, "T"], groups: int) -> Float[Tensor, "G"]:
    sums = values.new_zeros(groups).index_add(0, index, values)
    return sums / torch.bincount(index, minlength=groups)


def _equal(values: Float[Tensor, "T"], index: Int[Tensor, "T"], groups: int) -> Bool[Tensor, "G"]:
    """Whether all values of a group are the same."""
    highest = values.new_zeros(groups).scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = values.new_zeros(groups).scatter_reduce(0, index, values, "amin", include_self=False)
    return highest == lowest
