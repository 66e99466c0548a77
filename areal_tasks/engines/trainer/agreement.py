"""Whether server and trainer compute the same policy: the difference between their logprobs of the same tokens.

The server's logprobs are those that tokens were sampled with; the trainer computes its own with the weights at the
start of the iteration. Rounding alone gives a mean difference of 1e-7 to 1e-5 nats in float32, of hundredths in
bfloat16. A larger difference is a fault that training would hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from areal_tasks.engines.trainer.fencing import Declined

#: The ratios of trainer to server that count as agreement.
RATIOS: Final = (0.9, 1.1)


class EnginesDisagree(Declined):
    """The logprobs of server and trainer differ too much to train on the server's samples. No step was made."""


def gaps(proximal: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """|Δ logprob| in nats."""
    return (proximal - behaviour).abs()


def outside(proximal: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """1 where the ratio proximal / behaviour is outside RATIOS, else 0; NaN where it is NaN."""
    ratio = torch.exp(proximal - behaviour)
    beyond = ((ratio < RATIOS[0]) | (ratio > RATIOS[1])).to(ratio.dtype)
    return torch.where(ratio.isnan(), ratio, beyond)


def agreement(gap: Float[Tensor, " T"], beyond: Float[Tensor, " T"]) -> dict[str, float]:
    """The agreement columns of `train_steps` from the tokens' `gaps` and `outside`; NaN without tokens."""
    if not gap.numel():
        return dict.fromkeys(("logprob_gap_mean", "logprob_gap_max", "ratio_outside"), math.nan)
    return {
        "logprob_gap_mean": float(gap.double().mean()),
        "logprob_gap_max": float(gap.max()),
        "ratio_outside": float(beyond.double().mean()),
    }


def check_agreement(found: Mapping[str, float], bound: float, tokens: int) -> None:
    """Refuse a mean gap above `bound` (`algorithm.max_logprob_gap`). A NaN passes: a loss of NaN skips the step.

    Raises:
        EnginesDisagree: states the measurement, the usual causes, and the field to change.
    """
    if found["logprob_gap_mean"] > bound:
        raise EnginesDisagree(
            f"the servers and the trainer disagree: over {tokens} tokens their logprobs differ by "
            f"{found['logprob_gap_mean']:.4g} nats on average and {found['logprob_gap_max']:.4g} at most, and "
            f"{found['ratio_outside']:.1%} of the probability ratios are outside [{RATIOS[0]}, {RATIOS[1]}]; "
            f"algorithm.max_logprob_gap allows {bound:g} on average. No step was made. Likely causes: a server that "
            "generates at another temperature or with other weights than it reports, another dtype or quantisation, "
            "or tokens shifted by a chat template or a BOS token. Where the difference is understood and small enough, "
            "raise algorithm.max_logprob_gap."
        )
