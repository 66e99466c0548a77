"""GRPO's advantages: DeepSeekMath (arXiv:2402.03300), §4.1, with the KL penalty of its eq. 2 as an option.

The reward of a sample, relative to its group, is given at its last token; with KL in the reward, every token also
gets -β · k1. The advantage of a token is the sum of these from it on (discount 1, no critic), as in §4.1.3. Without KL
that is the group-relative reward at every token (§4.1.2).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_tasks.algorithms.log_ratios import k1
from areal_tasks.algorithms.normalisation import RewardNorm, group_rewards, whiten

AdvantageNorm = Literal["none", "group", "batch"]


class Advantages(NamedTuple):
    """T = Σ lengths, samples concatenated; 0 for samples that are not kept."""

    advantages: Float[Tensor, "T"]
    returns: Float[Tensor, "T"]  # before `advantage_norm`
    shaped_reward: Float[Tensor, "N"]  # a sample's whole return: `returns` of its first token


def grpo_advantages(
    rewards: Float[Tensor, "N"],
    groups: Int[Tensor, "N"],
    lengths: Int[Tensor, "N"],
    kept: Bool[Tensor, "N"],
    reward_norm: RewardNorm,
    advantage_norm: AdvantageNorm,
    penalty: Float[Tensor, "T"] | None = None,
    unbiased: bool = True,
) -> Advantages:
    """The advantages of all generated tokens, of which `lengths[i]` belong to sample i.

    `penalty` is the result of `kl_penalty`, or None without KL in the reward; `unbiased` selects the standard
    deviation of the norms (`normalisation`). Reward and penalty of samples that are not kept are ignored: they may be
    NaN.
    """
    relative = group_rewards(rewards, groups, kept, reward_norm, unbiased)
    counted = torch.repeat_interleave(kept, lengths)
    returns = torch.repeat_interleave(relative, lengths)
    shaped = relative
    if penalty is not None:
        parts = torch.split(torch.where(counted, penalty, 0.0), lengths.tolist())
        returns = returns - torch.cat([_sum_from_here(part) for part in parts])
        shaped = relative - torch.stack([part.sum() for part in parts])
    advantages = returns
    if advantage_norm != "none":
        members = torch.repeat_interleave(groups, lengths)[counted] if advantage_norm == "group" else None
        advantages = torch.zeros_like(returns)
        advantages[counted] = whiten(returns[counted], members, unbiased)
    return Advantages(advantages, returns, shaped)


def kl_penalty(logprobs: Float[Tensor, "T"], reference: Float[Tensor, "T"], kl_coef: float) -> Float[Tensor, "T"]:
    """β · k1, which is subtracted from each token's reward: DeepSeekMath, §4.1.1, eq. 2."""
    return kl_coef * k1(logprobs, reference)


def _sum_from_here(values: Float[Tensor, "L"]) -> Float[Tensor, "L"]:
    return values.flip(0).cumsum(0).flip(0)
