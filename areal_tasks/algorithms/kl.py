"""Per-token estimates of KL(policy ‖ reference) from tokens drawn from the policy.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, whose r is
reference / policy. k3 is also the KL term of GRPO: DeepSeekMath (arXiv:2402.03300), §4.1.1, eq. 4.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from areal_tasks.algorithms.log_ratios import LIMIT, bounded


def k1(logprobs: Float[Tensor, "T"], reference: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """-log r, in nats: unbiased; single tokens may be negative."""
    return logprobs - reference


def k3(logprobs: Float[Tensor, "T"], reference: Float[Tensor, "T"], limit: float = LIMIT) -> Float[Tensor, "T"]:
    """(r - 1) - log r, in nats: unbiased, never negative, and of less variance than k1; log r is bounded to `limit`."""
    log_r = bounded(reference - logprobs, limit)
    return torch.expm1(log_r) - log_r
