"""The metrics of training: rows of `train_steps`, columns of `train_samples`, and the stage's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.algorithms.behaviour import effective_sample_size
from areal_tasks.engines.trainer.objective import COMPARED, STATS, WEIGHTS, agreement

_WEIGHTED: Final = ("loss", "policy_loss")  # the others are means over tokens
_ELSEWHERE: Final = ("ratio", "clamped", "logprob_gap", "ratio_outside")  # not means, or named differently
#: Columns of `train_samples` and the rows of STATS they are means of.
_OF_SAMPLES: Final = {
    "sample_ratio": "ratio",
    "sample_clip_fraction": "clip_fraction",
    "sample_kl": "kl",
    "sample_loss": "loss",
    "sample_logprob_gap": "logprob_gap",
}
_GAP: Final = list(_OF_SAMPLES).index("sample_logprob_gap")
_MEANS: Final = (
    "loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio_mean", "grad_norm", "lr",
)  # fmt: skip


def totals(values: Float[Tensor, "K T"], weights: Float[Tensor, " T"]) -> Float[Tensor, "3 K"]:
    """The sum, weighted sum and maximum (-inf without tokens) of each row over a rank's tokens, on their device."""
    wide = values.double()
    largest = torch.nn.functional.pad(wide, (0, 1), value=-math.inf).amax(1)
    return torch.stack([wide.sum(1), wide @ weights.double(), largest])


def over_ranks(parts: Float[Tensor, "N ranks"]) -> Float[Tensor, "3 K"]:
    """The `totals` over all ranks' tokens, from those of each rank, one column per rank."""
    each = parts.view(3, len(parts) // 3, -1)
    return torch.cat([each[:2].sum(2), each[2:].amax(2)])


def step_statistics(found: Float[Tensor, "3 K"], tokens: int, measured: bool) -> dict[str, Any]:
    """The loss as minimised, means over `tokens` (0 without), and the engines' agreement, NaN unless `measured`."""
    sums, weighted, largest = (dict(zip((*STATS, *COMPARED, *WEIGHTS), row, strict=False)) for row in found.tolist())
    means = {name: total / max(tokens, 1) for name, total in sums.items()}
    compared = sums.get("compared", float(tokens))
    return {
        **{name: (weighted if name in _WEIGHTED else means)[name] for name in STATS if name not in _ELSEWHERE},
        "ratio_mean": means["ratio"],
        "ratio_max": largest["ratio"] if tokens else 0.0,
        "clamped": int(sums["clamped"]),
        "tokens": tokens,
        "compared": int(compared),
        **{name: sums[name] for name in WEIGHTS if name in sums},
        **agreement(compared if measured else 0.0, sums["logprob_gap"], largest["logprob_gap"], sums["ratio_outside"]),
    }


class TokenStats(NamedTuple):
    """Per-token quantities of a minibatch, one row per quantity (see `objective.STATS`), and each token's sample."""

    values: Float[Tensor, "K T"]
    samples: Int[Tensor, " T"]


class SampleMeans:
    """Means over each sample's tokens, minibatch by minibatch; the sum of all ranks' `parts` has all samples."""

    def __init__(self, samples: int) -> None:
        #: For each sample: the number of its tokens, of those that measure the engines' agreement, and each row's sum.
        self.parts = torch.zeros(2 + len(_OF_SAMPLES), samples, dtype=torch.float64)

    def add(self, stats: TokenStats, measured: bool) -> None:
        """Add the tokens of some samples, contiguous per sample; the engines' agreement is NaN unless `measured`."""
        if not len(stats.samples):
            return
        samples, lengths = torch.unique_consecutive(stats.samples, return_counts=True)
        starts = (lengths.cumsum(0) - lengths).numpy()
        rows = stats.values[[STATS.index(name) for name in _OF_SAMPLES.values()]].numpy()
        sums = torch.from_numpy(np.add.reduceat(rows, starts, axis=1, dtype=np.float64))
        if not measured:
            sums[_GAP] = math.nan
        compared = lengths
        if len(stats.values) > len(STATS):  # the row `compared` marks the tokens that measure the engines' agreement
            marked = stats.values[len(STATS)].numpy()
            compared = torch.from_numpy(np.add.reduceat(marked, starts, dtype=np.float64)).long()
        counts = torch.stack([lengths, compared])
        self.parts.index_add_(1, samples, torch.cat([counts.double(), sums]))

    def columns(self) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Columns of `train_samples`. A sample without counted tokens gets ratio 1, gap NaN and otherwise zeros."""
        tokens, compared, *sums = self.parts
        counts = {name: compared if name == "sample_logprob_gap" else tokens for name in _OF_SAMPLES}
        found = {name: (sum_ / counts[name].clamp(min=1)).float() for name, sum_ in zip(_OF_SAMPLES, sums, strict=True)}
        found["sample_ratio"] = torch.where(tokens > 0, found["sample_ratio"], 1.0)
        found["sample_logprob_gap"] = torch.where(compared > 0, found["sample_logprob_gap"], math.nan)
        return {name: column.numpy() for name, column in found.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The iteration in a few finite numbers: means over the optimizer steps that were made."""
    made = [row for row in rows if row["tokens"] and not row["skipped"]]
    means = {name: sum(row[name] for row in made) / len(made) for name in _MEANS} if made else {}
    peak = {"ratio_max": max(row["ratio_max"] for row in made)} if made else {}
    totals = {name: float(sum(row[name] for row in rows)) for name in ("clamped", "tokens", "total_tokens", "samples")}
    return {
        **means,
        **peak,
        **_agreement_summary(rows),
        **_weights_summary(made),
        **totals,
        "optimizer_steps": float(len(made)),
        "skipped_steps": float(sum(row["skipped"] for row in rows)),
        "train_seconds": float(sum(row["step_seconds"] for row in rows)),
    }


def _agreement_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The agreement of the engines over all tokens of the iteration for which it was measured; empty without any."""
    measured = [row for row in rows if math.isfinite(row["logprob_gap_mean"])]
    tokens = sum(row["compared"] for row in measured)
    if not measured:
        return {}
    means = {n: sum(r["compared"] * r[n] for r in measured) / tokens for n in ("logprob_gap_mean", "ratio_outside")}
    return {**means, "logprob_gap_max": max(row["logprob_gap_max"] for row in measured)}


def _weights_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the behaviour weights, as shares of the iteration's tokens; empty if the weights were not recorded."""
    if not rows or WEIGHTS[0] not in rows[0]:
        return {}
    tokens = sum(row["tokens"] for row in rows)
    total, squares, clipped = (sum(row[name] for row in rows) for name in WEIGHTS)
    return {
        "effective_sample_size": effective_sample_size(total, squares, tokens),
        "behaviour_clipped": clipped / tokens,
    }
