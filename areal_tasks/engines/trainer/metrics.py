"""What training says of itself: rows of `train_steps`, columns of `train_samples`, and the stage's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from areal_tasks.engines.trainer.agreement import agreement
from areal_tasks.engines.trainer.backend import TokenStats
from areal_tasks.engines.trainer.objective import STATS
from areal_tasks.engines.trainer.rows import make_table
from schemas.tables import TRAIN_STEPS

_WEIGHTED: Final = ("loss", "policy_loss")  # the others are means over tokens
_AGREEMENT: Final = ("logprob_gap", "ratio_outside")
_MEANS: Final = (
    "loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio_mean", "grad_norm", "lr",
)  # fmt: skip


def joined(stats: Sequence[TokenStats]) -> TokenStats:
    """Several parts of a minibatch, or several minibatches, as one."""
    return TokenStats(torch.cat([s.values for s in stats], 1), torch.cat([s.samples for s in stats]))


def step_statistics(stats: TokenStats, weights: Float[Tensor, " T"]) -> dict[str, Any]:
    """Loss (weighted as it is minimised), and means over the minibatch's tokens; zeros where it has none."""
    values = stats.values.double()
    tokens = values.shape[1]
    means = values.sum(1) / max(tokens, 1)
    sums = values @ weights.double()
    row = {
        name: float((sums if name in _WEIGHTED else means)[k]) for k, name in enumerate(STATS) if name not in _AGREEMENT
    }
    ratio_max = float(values[STATS.index("ratio")].max()) if tokens else 0.0
    agreed = agreement(*(values[STATS.index(name)] for name in _AGREEMENT))
    return {**row, "ratio_mean": row.pop("ratio"), "ratio_max": ratio_max, "tokens": tokens, **agreed}


def unmeasured(stats: TokenStats) -> TokenStats:
    """`stats` without the agreement of the engines, where nobody measured it."""
    values = stats.values.clone()
    values[[STATS.index(name) for name in _AGREEMENT]] = math.nan
    return TokenStats(values, stats.samples)


def sample_columns(stats: TokenStats, samples: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Means over the tokens of each sample. One without counted tokens gets ratio 1, no gap and otherwise zeros."""
    counts = torch.bincount(stats.samples, minlength=samples)
    sums = torch.zeros(len(STATS), samples, dtype=torch.float64).index_add_(1, stats.samples, stats.values.double())
    means = dict(zip(STATS, (sums / counts.clamp(min=1)).float(), strict=True))
    return {
        "sample_ratio": torch.where(counts > 0, means["ratio"], 1.0).numpy(),
        "sample_clip_fraction": means["clip_fraction"].numpy(),
        "sample_kl": means["kl"].numpy(),
        "sample_loss": means["loss"].numpy(),
        "sample_logprob_gap": torch.where(counts > 0, means["logprob_gap"], math.nan).numpy(),
    }


def steps_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """The `train_steps` table."""
    return make_table("train_steps", {name: [row[name] for row in rows] for name in TRAIN_STEPS.names})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The iteration in a few finite numbers: means over the optimizer steps that were made."""
    made = [row for row in rows if row["tokens"] and not row["skipped"]]
    means = {name: sum(row[name] for row in made) / len(made) for name in _MEANS} if made else {}
    peak = {"ratio_max": max(row["ratio_max"] for row in made)} if made else {}
    totals = {name: float(sum(row[name] for row in rows)) for name in ("tokens", "total_tokens", "samples")}
    return {
        **means,
        **peak,
        **_agreement_summary(rows),
        **totals,
        "optimizer_steps": float(len(made)),
        "skipped_steps": float(sum(row["skipped"] for row in rows)),
        "train_seconds": float(sum(row["step_seconds"] for row in rows)),
    }


def _agreement_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The agreement of the engines over all tokens of the iteration for which it was measured; nothing without any."""
    measured = [row for row in rows if math.isfinite(row["logprob_gap_mean"])]
    tokens = sum(row["tokens"] for row in measured)
    if not measured:
        return {}
    means = {n: sum(r["tokens"] * r[n] for r in measured) / tokens for n in ("logprob_gap_mean", "ratio_outside")}
    return {**means, "logprob_gap_max": max(row["logprob_gap_max"] for row in measured)}
