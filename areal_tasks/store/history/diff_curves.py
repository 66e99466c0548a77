"""Curves and distributions of two runs compared, as rows that a terminal, a page or JSON can show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from areal_tasks.store.backend import Store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.tables import VERDICTS

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
_SHAPE: Final = ("mean", "std", "min", "25%", "median", "75%", "max")
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
    """A metric by iteration. An iteration's second evaluation is of the weights it made: it belongs to the next."""
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
    rows = list[dict[str, Any]]()
    for name, values, numbers in zip(names, (a, b), known, strict=True):
        shape, histogram = dict[str, float | None].fromkeys(_SHAPE), ""
        if len(numbers):
            points = [numbers.mean(), numbers.std(), *np.quantile(numbers, (0, 0.25, 0.5, 0.75, 1))]
            shape = {key: float(point) for key, point in zip(_SHAPE, points, strict=True)}
            counts = np.histogram(numbers, BINS, span)[0]
            histogram = sparkline(counts.tolist(), 0, float(counts.max()))
        about = {"run": name, "samples": len(numbers), "unknown": len(values) - len(numbers)}
        rows.append({**about, **shape, "histogram": histogram})
    return Section(title, rows)


# ── a replay and the run that it replays: verdicts, rewards, advantages and curves ────────────────────────────────────


_REWARDS = "SELECT iteration, sample_id, verdict, CAST(reward AS DOUBLE) AS reward FROM {} WHERE {} ORDER BY ALL"
#: A GRPO advantage is the same for all tokens of a sample, unless a KL penalty is part of the reward.
_ADVANTAGES = (
    "SELECT CAST(list_sum(advantages) / num_generated AS DOUBLE) AS advantage"
    " FROM advantage JOIN rollout USING (iteration, sample_id) WHERE kept AND num_generated > 0 AND {}"
    " ORDER BY iteration, sample_id"
)


def compare_replay(store: Store, name: str) -> list[Section]:
    """Compare the iterations that a replay has built with those of the original.

    Stages that the replay took from the original in every iteration are not compared.

    Raises UserError: the run is no replay, or has built nothing yet.
    """
    run = load_run(store, name)
    original, head = run.parent, run.head()
    if original is None or run.record.kind != "replay":
        raise UserError(f"Run {name!r} is no replay: arealflow diff compares any two runs.")
    if head is None or head.run != name:
        raise UserError(f"Run {name!r} has not built any iteration yet: run the same arealflow replay again.")
    names, where = (original.name, name), f"iteration BETWEEN {run.first} AND {head.iteration}"
    counts = _counts(run, head.iteration)
    stages = {stage for stage, (_, built) in counts.items() if built}
    rows = [{"stage": stage, "taken": taken, "built": built} for stage, (taken, built) in counts.items()]
    sections = [Section("iterations by stage", rows)]
    judged = "evaluate" if run.record.flow == "evaluate" else "verify"
    if judged in stages:
        sections += _judgements(store, names, judged, where, _same_rollouts(original, run, head.iteration))
    if "advantage" in stages:
        tables = [run_sql(store, one, _ADVANTAGES.format(where)) for one in names]
        shapes = [np.asarray(table["advantage"].to_numpy(), np.float64) for table in tables]
        sections.append(compare_distributions("advantage of a sample", shapes[0], shapes[1], names))
    curves, built = [read_curves(store, one) for one in names], range(run.first, head.iteration + 2)
    common = curves[0].keys() & curves[1].keys()
    parts = [{name: {k: v for k, v in part[name].items() if k in built} for name in common} for part in curves]
    return [*sections, compare_curves(parts[0], parts[1], names)]


def _counts(run: Run, last: int) -> dict[str, list[int]]:
    """By stage, the number of iterations in which it was taken from the original, and in which it was built."""
    counts: dict[str, list[int]] = {}
    for k in range(run.first, last + 1):
        for ref in run.commit(k).stages:
            counts.setdefault(ref.stage, [0, 0])[ref.path.startswith(f"{run.name}/")] += 1
    return counts


def _same_rollouts(a: Run, b: Run, last: int) -> bool:
    """Whether both runs judged the same completions in every iteration."""
    digests = [
        [ref.digest for k in range(b.first, last + 1) for ref in run.commit(k).stages if ref.stage == "rollout"]
        for run in (a, b)
    ]
    return digests[0] == digests[1]


def _judgements(store: Store, names: tuple[str, str], judged: str, where: str, same: bool) -> list[Section]:
    tables = [run_sql(store, one, _REWARDS.format(judged, where)) for one in names]
    rewards = [np.asarray(table["reward"].to_numpy(), np.float64) for table in tables]
    shapes = compare_distributions("reward", rewards[0], rewards[1], names)
    if not same:  # other completions: their verdicts cannot be paired
        return [shapes]
    verdicts = [table["verdict"].to_pylist() for table in tables]
    return [confusion(verdicts[0], verdicts[1], names), shapes]


def confusion(a: list[str], b: list[str], names: tuple[str, str]) -> Section:
    """The number of samples by verdict in `a` (rows) and in `b` (columns); both list the same samples."""
    pairs = Counter(zip(a, b, strict=True))
    used = [verdict for verdict in VERDICTS if verdict in a or verdict in b]
    rows: list[dict[str, Any]] = [
        {f"{names[0]} \\ {names[1]}": old, **{new: pairs[old, new] for new in used}} for old in used
    ]
    changed = sum(count for (old, new), count in pairs.items() if old != new)
    return Section(f"verdicts: {changed} of {len(a)} changed", rows)
