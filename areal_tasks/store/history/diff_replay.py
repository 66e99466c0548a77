"""A replay compared with the run that it replays: verdicts, rewards, advantages and curves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_tasks.store.backend import Store
from areal_tasks.store.history.diff_curves import Section, compare_curves, compare_distributions, read_curves
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.tables import VERDICTS

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

    Raises:
        UserError: the run is no replay, or has built nothing yet.
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
    sections = [_built(counts)]
    judged = "evaluate" if run.record.flow == "evaluate" else "verify"
    if judged in stages:
        sections += _judgements(store, names, judged, where, _same_rollouts(original, run, head.iteration))
    if "advantage" in stages:
        shapes = [_column(store, one, _ADVANTAGES.format(where), "advantage") for one in names]
        sections.append(compare_distributions("advantage of a sample", shapes[0], shapes[1], names))
    curves = [{n: _within(c, run.first, head.iteration) for n, c in read_curves(store, one).items()} for one in names]
    both = [{name: curve for name, curve in part.items() if name in curves[0] and name in curves[1]} for part in curves]
    return [*sections, compare_curves(both[0], both[1], names)]


def _within(curve: dict[int, float], first: int, last: int) -> dict[int, float]:
    return {k: value for k, value in curve.items() if first <= k <= last + 1}


def _counts(run: Run, last: int) -> dict[str, list[int]]:
    """In how many iterations each stage was taken from the original, and in how many it was built."""
    counts: dict[str, list[int]] = {}
    for k in range(run.first, last + 1):
        for ref in run.commit(k).stages:
            counts.setdefault(ref.stage, [0, 0])[ref.path.startswith(f"{run.name}/")] += 1
    return counts


def _built(counts: dict[str, list[int]]) -> Section:
    rows = [{"stage": stage, "taken": taken, "built": built} for stage, (taken, built) in counts.items()]
    return Section("iterations by stage", rows)


def _same_rollouts(a: Run, b: Run, last: int) -> bool:
    """Whether both runs judged the same completions in every iteration."""
    return all(_rollout(a, k) == _rollout(b, k) for k in range(b.first, last + 1))


def _rollout(run: Run, k: int) -> list[str]:
    return [ref.digest for ref in run.commit(k).stages if ref.stage == "rollout"]


def _judgements(store: Store, names: tuple[str, str], judged: str, where: str, same: bool) -> list[Section]:
    tables = [run_sql(store, one, _REWARDS.format(judged, where)) for one in names]
    rewards = [np.asarray(table["reward"].to_numpy(), np.float64) for table in tables]
    shapes = compare_distributions("reward", rewards[0], rewards[1], names)
    if not same:  # other completions: their verdicts cannot be paired
        return [shapes]
    verdicts = [table["verdict"].to_pylist() for table in tables]
    return [confusion(verdicts[0], verdicts[1], names), shapes]


def confusion(a: list[str], b: list[str], names: tuple[str, str]) -> Section:
    """How many samples with each verdict in `a` (rows) have which in `b` (columns); both list the same samples."""
    pairs = Counter(zip(a, b, strict=True))
    used = [verdict for verdict in VERDICTS if verdict in a or verdict in b]
    rows: list[dict[str, Any]] = [
        {f"{names[0]} \\ {names[1]}": old, **{new: pairs[old, new] for new in used}} for old in used
    ]
    changed = sum(count for (old, new), count in pairs.items() if old != new)
    return Section(f"verdicts: {changed} of {len(a)} changed", rows)


def _column(store: Store, run: str, query: str, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(run_sql(store, run, query)[name].to_numpy(), np.float64)
