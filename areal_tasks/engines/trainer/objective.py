"""The per-token training objective: GRPO's clipped objective with its KL term, or the cross-entropy of SFT.

Also the agreement of server and trainer: the difference between their logprobs of the same tokens, sampled by one and
computed by the other with the weights at the start of the iteration. Rounding alone gives a mean of 1e-7 to 1e-5 nats
in float32, of hundredths in bfloat16. A larger difference is a fault that training would hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.algorithms.behaviour import behaviour_weights
from areal_tasks.algorithms.log_ratios import any_above, k3
from areal_tasks.algorithms.losses import policy_terms, sft_terms
from areal_tasks.engines.trainer.fencing import Declined
from areal_tasks.engines.trainer.settings import Settings

#: The rows of a `TokenStats`; the first is what is minimised, the last two are the agreement of server and trainer.
STATS: Final = (
    *("loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio", "clamped"),
    *("logprob_gap", "ratio_outside"),
)

#: A further row if tokens may be older than the policy: 1 at those that measure the agreement of server and trainer.
COMPARED: Final = ("compared",)
#: More rows if the objective is then decoupled: the behaviour weights, their squares, 1 where a bound changed one.
WEIGHTS: Final = ("behaviour_weight", "behaviour_square", "behaviour_bounded")

#: Maps the logprobs and entropies of counted tokens and their indices in the flat columns to the rows of STATS.
Objective = Callable[[Float[Tensor, " T"], Float[Tensor, " T"], Int[Tensor, " T"]], Float[Tensor, "K T"]]


def stat_names(columns: Container[str], settings: Settings) -> tuple[str, ...]:
    """The names of the rows that the objective returns for a batch with these columns."""
    if "comparable" not in columns:
        return STATS
    return (*STATS, *COMPARED, *(WEIGHTS if "proximal" in columns or settings.own_proximal else ()))


def grpo_objective(columns: dict[str, Float[Tensor, " N"]], settings: Settings) -> Objective:
    """GRPO over flat columns `behaviour`, `advantages` and optionally `reference` and `proximal`, decoupled (AReaL,
    arXiv:2505.24298, §5.2): the ratio to the proximal policy is clipped, and the result is weighted by proximal /
    behaviour, of the token or, if there is a column `log_ratio`, from that.

    The proximal policy is the one at the start of the iteration: column `proximal`; without it the step's own forward
    pass if `settings.own_proximal`, else the behaviour policy, which makes every weight 1. Without the column, the
    step's own forward pass measures the agreement: meaningless once the policy has changed, and at tokens that are not
    `comparable`, if there is that column. KL to the reference is estimated from tokens of the behaviour policy, which
    is within η + 1 iterations of the policy.
    """
    names = stat_names(columns, settings)

    def objective(
        logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
    ) -> Float[Tensor, "K T"]:
        """An `Objective`."""
        own, behaviour = logprobs.detach(), columns["behaviour"][where]
        limit = settings.log_ratio_limit
        start = columns["proximal"][where] if "proximal" in columns else own
        proximal = start if "proximal" in columns or settings.own_proximal else behaviour
        reference = columns["reference"][where] if "reference" in columns else None
        terms = policy_terms(logprobs, proximal, columns["advantages"][where], settings.clip_ratio, limit)
        log_ratio = columns["log_ratio"][where] if "log_ratio" in columns else proximal - behaviour
        weights = behaviour_weights(log_ratio, settings.behaviour, limit)
        policy_loss = weights.applied * terms.loss
        zero = torch.zeros_like(own)
        kl = zero if reference is None else k3(logprobs if settings.kl_coef else own, reference, limit)
        loss = policy_loss + settings.kl_coef * kl if settings.kl_coef else policy_loss
        to_reference = zero if reference is None else reference - own
        clamped = any_above(limit, own - proximal, log_ratio, to_reference)
        measured = (k3(behaviour, own, limit), entropy, terms.clipped.float(), terms.ratio, clamped.float())
        apart = differences(start, behaviour)
        rows = [loss, policy_loss, kl, *measured, *apart]
        if "comparable" in columns:
            compared = columns["comparable"][where]
            rows[-2:] = apart.masked_fill(compared == 0, 0.0)
            rows += [compared, weights.applied, weights.applied.square(), weights.bounded.float()]
        return torch.stack(rows[: len(names)])

    return objective


def sft_objective(
    logprobs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], where: Int[Tensor, " T"]
) -> Float[Tensor, "K T"]:
    """Cross-entropy of demonstrated tokens; there is no other policy to compare with."""
    loss = sft_terms(logprobs)
    zero, one, unknown = torch.zeros_like(loss), torch.ones_like(loss), torch.full_like(loss, math.nan)
    return torch.stack([loss, loss, zero, zero, entropy, zero, one, zero, unknown, unknown])


# ── whether server and trainer compute the same policy ──────────────────────────────────────────────────────────────


#: The ratios of trainer to server that count as agreement.
RATIOS: Final = (0.9, 1.1)


def differences(proximal: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, "2 T"]:
    """|Δ logprob| in nats; and 1 where the ratio proximal / behaviour is outside RATIOS, else 0 (NaN where it is)."""
    change = proximal - behaviour
    ratio = torch.exp(change)
    outside = ((ratio < RATIOS[0]) | (ratio > RATIOS[1])).to(ratio.dtype)
    return torch.stack([change.abs(), torch.where(ratio.isnan(), ratio, outside)])


def agreement_totals(found: Float[Tensor, "2 T"]) -> list[float]:
    """The number of tokens with these `differences`, their sum and maximum, and how many ratios are outside."""
    gaps, outside = found.double()
    return [float(gaps.numel()), float(gaps.sum()), float(gaps.max()) if len(gaps) else -math.inf, float(outside.sum())]


def agreement(tokens: float, gaps: float, largest: float, outside: float) -> dict[str, float]:
    """The agreement of server and trainer, from `agreement_totals`; NaN without tokens."""
    shown = (gaps / tokens, largest, outside / tokens) if tokens else (math.nan,) * 3
    return dict(zip(("logprob_gap_mean", "logprob_gap_max", "ratio_outside"), shown, strict=True))


def check_agreement(found: Mapping[str, float], bound: float, tokens: int, said: str = "No step was made.") -> None:
    """Refuse a mean gap above `bound` (`algorithm.max_logprob_gap`). A NaN passes: a loss of NaN skips the step.

    `said`: the sentence of the message that states the consequence. Declined states the measurement, the usual causes,
    and the field to change.
    """
    if found["logprob_gap_mean"] > bound:
        raise Declined(
            f"the servers and the trainer disagree: over {tokens} tokens their logprobs differ by "
            f"{found['logprob_gap_mean']:.4g} nats on average and {found['logprob_gap_max']:.4g} at most, and "
            f"{found['ratio_outside']:.1%} of the probability ratios are outside [{RATIOS[0]}, {RATIOS[1]}]; "
            f"algorithm.max_logprob_gap allows {bound:g} on average. {said} Likely causes: a server that "
            "generates at another temperature or with other weights than it reports, another dtype or quantisation, "
            "or tokens shifted by a chat template or a BOS token. Where the difference is understood and small enough, "
            "raise algorithm.max_logprob_gap."
        )
