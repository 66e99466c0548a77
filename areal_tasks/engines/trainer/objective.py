"""What training minimises, per token: GRPO's clipped objective with its KL term, or the cross-entropy of SFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.algorithms.kl import k3
from areal_tasks.algorithms.losses import policy_terms, sft_terms

#: The rows of a `TokenStats`; the first is what is minimised.
STATS: Final = ("loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio")

#: From the logprobs and entropies of some counted tokens and their index in the flat columns, to the rows of STATS.
Objective = Callable[[Float[Tensor, " T"], Float[Tensor, " T"], Int[Tensor, " T"]], Float[Tensor, "K T"]]


def grpo_objective(columns: dict[str, Float[Tensor, " N"]], clip_ratio: float, kl_coef: float) -> Objective:
    """GRPO over flat columns `behaviour`, `advantages` and perhaps `reference`; `kl_coef` weighs k3 in the loss.

    KL to the reference is estimated from tokens of the behaviour policy, which is the policy to within one iteration.
    """

    def objective(
        logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
    ) -> Float[Tensor, "K T"]:
        behaviour = columns["behaviour"][where]
        terms = policy_terms(logprobs, behaviour, columns["advantages"][where], clip_ratio)
        kl = k3(logprobs, columns["reference"][where]) if "reference" in columns else torch.zeros_like(behaviour)
        loss = terms.loss + kl_coef * kl if kl_coef else terms.loss
        drift = k3(behaviour, logprobs.detach())
        return torch.stack([loss, terms.loss, kl, drift, entropy, terms.clipped.float(), terms.ratio])

    return objective


def sft_objective(
    logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
) -> Float[Tensor, "K T"]:
    """Cross-entropy of demonstrated tokens; there is no other policy to compare with."""
    loss = sft_terms(logprobs)
    zero, one = torch.zeros_like(loss), torch.ones_like(loss)
    return torch.stack([loss, loss, zero, zero, entropy, zero, one])
