"""What training minimises, per token: GRPO's clipped objective with its KL term, or the cross-entropy of SFT."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.algorithms.kl import k3
from areal_tasks.algorithms.log_ratios import beyond
from areal_tasks.algorithms.losses import behaviour_weights, policy_terms, sft_terms
from areal_tasks.engines.trainer.agreement import gaps, outside
from areal_tasks.engines.trainer.settings import Settings

#: The rows of a `TokenStats`; the first is what is minimised, the last two are the agreement of server and trainer.
STATS: Final = (
    *("loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio", "clamped"),
    *("logprob_gap", "ratio_outside"),
)

#: From the logprobs and entropies of some counted tokens and their index in the flat columns, to the rows of STATS.
Objective = Callable[[Float[Tensor, " T"], Float[Tensor, " T"], Int[Tensor, " T"]], Float[Tensor, "K T"]]


def grpo_objective(columns: dict[str, Float[Tensor, " N"]], settings: Settings) -> Objective:
    """GRPO over flat columns `behaviour`, `advantages` and perhaps `reference` and `proximal`, decoupled (AReaL,
    arXiv:2505.24298, §5.2): the ratio to the proximal policy is clipped, proximal / behaviour weighs the result.

    The proximal policy is the one the iteration began with: column `proximal`; without it the step's own forward pass
    where `settings` say that the step begins the iteration, else the behaviour policy, which makes every weight 1. The
    agreement is then measured by the step's own forward pass: meaningless once the policy has moved. KL to the
    reference is estimated from tokens of the behaviour policy, which is the policy to within one iteration.
    """

    def objective(
        logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
    ) -> Float[Tensor, "K T"]:
        own, behaviour = logprobs.detach(), columns["behaviour"][where]
        limit = settings.log_ratio_limit
        start = columns["proximal"][where] if "proximal" in columns else own
        proximal = start if "proximal" in columns or settings.own_proximal else behaviour
        reference = columns["reference"][where] if "reference" in columns else None
        terms = policy_terms(logprobs, proximal, columns["advantages"][where], settings.clip_ratio, limit)
        policy_loss = behaviour_weights(proximal, behaviour, settings.behaviour_cap, limit) * terms.loss
        zero = torch.zeros_like(own)
        kl = zero if reference is None else k3(logprobs if settings.kl_coef else own, reference, limit)
        loss = policy_loss + settings.kl_coef * kl if settings.kl_coef else policy_loss
        to_reference = zero if reference is None else reference - own
        clamped = beyond(limit, own - proximal, proximal - behaviour, to_reference)
        measured = (k3(behaviour, own, limit), entropy, terms.clipped.float(), terms.ratio, clamped.float())
        return torch.stack([loss, policy_loss, kl, *measured, gaps(start, behaviour), outside(start, behaviour)])

    return objective


def sft_objective(
    logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
) -> Float[Tensor, "K T"]:
    """Cross-entropy of demonstrated tokens; there is no other policy to compare with."""
    loss = sft_terms(logprobs)
    zero, one, unknown = torch.zeros_like(loss), torch.ones_like(loss), torch.full_like(loss, math.nan)
    return torch.stack([loss, loss, zero, zero, entropy, zero, one, zero, unknown, unknown])
