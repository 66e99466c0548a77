"""Log-ratios of two policies, bounded before they are exponentiated, and estimates of KL from them.

exp overflows above 88 in float32, and 0 · inf is NaN: a single token would make the gradient of the whole minibatch
NaN, even one that is clipped, or whose advantage is 0. Only large ratios overflow, so only these are bounded: small
ones vanish in the ratio, and in k3 the linear term pulls a policy that is far from the reference back to it. verl
bounds both sides, to ±20 (`verl/trainer/ppo/core_algos.py`, policy loss and `kl_penalty`).

k1 and k3 estimate KL(policy ‖ reference) per token, from tokens drawn from the policy: J. Schulman, "Approximating KL
Divergence" (2020), http://joschu.net/blog/kl-approx.html, whose r is reference / policy. k3 is also the KL term of
GRPO: DeepSeekMath (arXiv:2402.03300), §4.1.1, eq. 4.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: In nats: a ratio of 4.9e8.
MAX_LOG_RATIO: Final = 20.0


def bounded(log_ratio: Float[Tensor, "T"], limit: float) -> Float[Tensor, "T"]:
    """The log-ratio, at most `limit` nats; no gradient above, bitwise unchanged below."""
    return log_ratio.clamp(max=limit)


def any_above(limit: float, *log_ratios: Float[Tensor, "T"]) -> Bool[Tensor, "T"]:
    """The tokens for which `bounded` changes one of these log-ratios."""
    return torch.stack(log_ratios).gt(limit).any(0)


def k1(logprobs: Float[Tensor, "T"], reference: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """-log r, in nats: unbiased; single tokens may be negative."""
    return logprobs - reference


def k3(logprobs: Float[Tensor, "T"], reference: Float[Tensor, "T"], limit: float = MAX_LOG_RATIO) -> Float[Tensor, "T"]:
    """(r - 1) - log r, in nats: unbiased, never negative, and of less variance than k1; log r is bounded to `limit`."""
    log_r = bounded(reference - logprobs, limit)
    return torch.expm1(log_r) - log_r
