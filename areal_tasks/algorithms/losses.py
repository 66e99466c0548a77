"""Loss terms per generated token, and the weights that turn them into one loss.

The caller selects the positions that count *before* it calls (multiplying by a mask would let NaN
through), so all tensors here hold the generated tokens of the samples, concatenated: T = Σ lengths. The loss of
a minibatch is Σ weight · term, so it can be summed over micro-batches and ranks in any split.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_tasks.algorithms.log_ratios import MAX_LOG_RATIO, bounded

LossMean = Literal["token_mean", "sequence_mean"]


class PolicyTerms(NamedTuple):
    """The terms of the clipped objective per token."""

    loss: Float[Tensor, "T"]
    ratio: Float[Tensor, "T"]  # policy / proximal
    clipped: Bool[Tensor, "T"]  # the clipped term is the minimum, so that the token has no gradient


def policy_terms(
    logprobs: Float[Tensor, "T"],
    proximal: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    clip_ratio: float,
    limit: float = MAX_LOG_RATIO,
) -> PolicyTerms:
    """-min(ratio · A, clip(ratio, 1-ε, 1+ε) · A): PPO (arXiv:1707.06347), §3, eq. 7; gradient flows to `logprobs`.

    `proximal`: log-probabilities of the policy that the iteration began with, to which the clip is relative. The ratio
    is at most e^limit (see `log_ratios`).
    """
    ratio = torch.exp(bounded(logprobs - proximal, limit))
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    return PolicyTerms(-torch.minimum(free, clipped), ratio.detach(), (clipped < free).detach())


def sft_terms(logprobs: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Cross-entropy of the demonstrated tokens, in nats."""
    return -logprobs


def token_weights(lengths: Int[Tensor, "B"], how: LossMean) -> Float[Tensor, "T"]:
    """Each token's weight in the loss; their sum is 1 (empty if no sequence has a token).

    `token_mean`: equal for all tokens (DAPO, arXiv:2503.14476, §3.3). `sequence_mean`: equal for all sequences, and
    for the tokens of one (GRPO, arXiv:2402.03300, §4.1.1, eq. 3). Sequences without tokens are ignored.
    """
    total = int(lengths.sum())
    if how == "token_mean":
        return torch.full((total,), 1.0 / max(total, 1), device=lengths.device)
    share = 1.0 / (lengths * (lengths > 0).sum()).clamp(min=1)
    return torch.repeat_interleave(share, lengths)
