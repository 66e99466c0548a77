"""Curves and distributions of two runs side by side, as rows that a terminal, a page or JSON can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from areal_tasks.store.backend import Store
from areal_tasks.store.query import run_sql

Curve = dict[int, float]  # by iteration

#: Name of a curve -> the stage and the metric of its manifests that it shows.
CURVES: Final = {
    "reward": ("verify", "reward"),
    "accuracy": ("evaluate", "accuracy"),
    "loss": ("train", "loss"),
    "kl": ("train", "kl"),
    "approx_kl": ("train", "approx_kl"),
    "entropy": ("train", "entropy"),
    "clip_fraction": ("train", "clip_fraction"),
    "grad_norm": ("train", "grad_norm"),
    "lag_mean": ("train", "lag_mean"),
    "effective_sample_size": ("train", "effective_sample_size"),
    "length": ("rollout", "mean_tokens"),
    "kept": ("advantage", "kept"),
}
BARS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 32
BINS: Final = 16
_QUERY: Final = "SELECT iteration, stage, metrics FROM stages WHERE stage IN ({}) ORDER BY iteration, committed"


@dataclass(frozen=True)
class Section:
    """A table of a comparison: its title, and its rows, which all have the same columns."""

    title: str
    rows: Sequence[Mapping[str, Any]]


def read_curves(store: Store, run: str) -> dict[str, Curve]:
    """A run's curves, from its stages' metrics, without those that are all NaN."""
    stages = ", ".join(f"'{stage}'" for stage in sorted({stage for stage, _ in CURVES.values()}))
    rows = run_sql(store, run, _QUERY.format(stages)).to_pylist()
    found = {name: _curve(rows, stage, metric) for name, (stage, metric) in CURVES.items()}
    return {name: curve for name, curve in found.items() if curve}


def _curve(rows: Sequence[Mapping[str, Any]], stage: str, metric: str) -> Curve:
    """A metric by iteration. An iteration's second evaluation is of the weights it made: it counts for the next."""
    curve: Curve = {}
    for row in rows:
        value = dict(row["metrics"]).get(metric, math.nan) if row["stage"] == stage else math.nan
        if not math.isnan(value):
            curve[row["iteration"] + (row["iteration"] in curve)] = value
    return curve


def compare_curves(a: Mapping[str, Curve], b: Mapping[str, Curve], names: tuple[str, str]) -> Section:
    """The last value of each curve, the mean difference over the iterations that both have, and sparklines.

    Both sparklines of a curve share a scale. Equal curves are named in the title.
    """
    pairs = {name: (a.get(name, {}), b.get(name, {})) for name in CURVES if name in a or name in b}
    equal = [name for name, (one, other) in pairs.items() if one == other]
    rows = [_curve_row(name, *pair, names) for name, pair in pairs.items() if name not in equal]
    return Section(f"curves (equal in both: {', '.join(equal)})" if equal else "curves", rows)


def _curve_row(name: str, a: Curve, b: Curve, names: tuple[str, str]) -> dict[str, Any]:
    both = sorted(a.keys() & b.keys())
    values = [*a.values(), *b.values()]
    low, high = min(values), max(values)
    return {
        "curve": name,
        f"last of {names[0]}": a[max(a)] if a else None,
        f"last of {names[1]}": b[max(b)] if b else None,
        "iterations of both": len(both),
        "mean difference": float(np.mean([b[k] - a[k] for k in both])) if both else None,
        names[0]: sparkline([a[k] for k in sorted(a)], low, high),
        names[1]: sparkline([b[k] for k in sorted(b)], low, high),
    }


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """`values` as a line of at most `WIDTH` bars between `low` and `high`; longer series are averaged."""
    if not values:
        return ""
    parts = np.array_split(np.asarray(values, float), min(WIDTH, len(values)))
    span = high - low or 1.0
    places = [round((float(part.mean()) - low) / span * (len(BARS) - 1)) for part in parts]
    return "".join(BARS[place] for place in places)


def compare_distributions(
    title: str, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], names: tuple[str, str]
) -> Section:
    """Count, mean, spread and quartiles of two sets of numbers, and their histograms over one range. NaN is counted."""
    known = [values[~np.isnan(values)] for values in (a, b)]
    whole = np.concatenate(known)
    span = (float(whole.min()), float(whole.max())) if len(whole) else (0.0, 0.0)
    pairs = zip(names, (a, b), known, strict=True)
    return Section(title, [_distribution_row(name, len(v) - len(k), k, span) for name, v, k in pairs])


def _distribution_row(
    name: str, unknown: int, values: npt.NDArray[np.float64], span: tuple[float, float]
) -> dict[str, Any]:
    if not len(values):
        return {"run": name, "samples": 0, "unknown": unknown, **dict.fromkeys(_SHAPE), "histogram": ""}
    points = [values.mean(), values.std(), *np.quantile(values, (0, 0.25, 0.5, 0.75, 1))]
    counts = np.histogram(values, BINS, span)[0]
    return {
        "run": name,
        "samples": len(values),
        "unknown": unknown,
        **{key: float(value) for key, value in zip(_SHAPE, points, strict=True)},
        "histogram": sparkline(counts.tolist(), 0, float(counts.max())),
    }


_SHAPE: Final = ("mean", "std", "min", "25%", "median", "75%", "max")
