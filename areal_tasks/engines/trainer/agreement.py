"""Whether the server and the trainer mean the same policy: how far apart their logprobs of the same tokens are.

The server's are those a token was sampled with; the trainer's are its own under the weights the iteration began with.
Rounding sets them apart: by 1e-7 to 1e-5 nats on average in float32, by hundredths in bfloat16. More is a fault that
training would hide.
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
    """Server and trainer are too far apart to train on what the server sampled. No step was made."""


def gaps(proximal: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """|Δ logprob| in nats."""
    return (proximal - behaviour).abs()


def outside(proximal: Float[Tensor, " T"], behaviour: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """1 where the ratio proximal / behaviour is outside RATIOS, else 0; NaN where it is NaN."""
    ratio = torch.exp(proximal - behaviour)
    beyond = ((ratio < RATIOS[0]) | (ratio > RATIOS[1])).to(ratio.dtype)
    return torch.where(ratio.isnan(), ratio, beyond)


def agreement(gap: Float[Tensor, " T"], beyond: Float[Tensor, " T"]) -> dict[str, float]:
    """The columns of `train_steps` that tell of it, over tokens' `gaps` and `outside`. NaN without tokens."""
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
        EnginesDisagree: with what was measured, what usually causes it, and the knob.
    """
    if found["logprob_gap_mean"] > bound:
        raise EnginesDisagree(
            f"the servers and the trainer disagree: over {tokens} tokens their logprobs differ by "
            f"{found['logprob_gap_mean']:.4g} nats on average and {found['logprob_gap_max']:.4g} at most, and "
            f"{found['ratio_outside']:.1%} of the probability ratios are outside [{RATIOS[0]}, {RATIOS[1]}]; "
            f"algorithm.max_logprob_gap allows {bound:g} on average. No step was made. Likely causes: a server that "
            "generates at another temperature or with other weights than it says, another dtype or quantisation there, "
            "or tokens shifted by a chat template or a BOS token. Where the difference is understood and small enough, "
            "raise algorithm.max_logprob_gap."
        )
