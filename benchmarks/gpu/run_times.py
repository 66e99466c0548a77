"""Where a run's time went, from its own tables: a row per iteration, and their summary. Pure functions and SQL."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from areal_tasks.store.backend import Store
from benchmarks.gpu.product import rows

Row = dict[str, Any]

QUERIES: Final = {
    "commits": "SELECT iteration, epoch(started) AS started, epoch(committed) AS committed, checkpoint_version, owner "
    "FROM commits",
    "stages": "SELECT iteration, stage, seconds, bytes, epoch(started) AS started, epoch(committed) AS committed "
    "FROM stages",
    "rollout": "SELECT iteration, count(*) AS samples, sum(num_generated) AS generated, sum(num_tokens) AS tokens, "
    "max(seconds) AS generation, avg(num_tokens) AS mean_tokens, "
    "count(*) FILTER (stop_reason = 'length') AS full_length FROM rollout GROUP BY 1",
    "train": "SELECT iteration, sum(total_tokens) AS trained, sum(step_seconds) AS steps, "
    "avg(logprob_gap_mean) AS gap_mean, max(logprob_gap_max) AS gap_max, avg(ratio_outside) AS ratio_outside "
    "FROM train_steps GROUP BY 1",
    "publish": "SELECT iteration, transport, materialised, bytes AS weight_bytes, write_seconds, "
    "coalesce(list_max(load_seconds), 0) AS load_seconds FROM publish",
}


def iteration_rows(store: Store, run: str, raw: Sequence[Row] = ()) -> list[Row]:
    """One row per iteration of a run; `raw`: the raw rounds within its rollouts, whose time is not the run's."""
    return join({name: rows(store, run, query) for name, query in QUERIES.items()}, raw)


def join(tables: dict[str, list[Row]], raw: Sequence[Row] = ()) -> list[Row]:
    """One row per iteration.

    `wall` is the time between two commits (the first of an owner: since its own start); `age` counts the iterations
    since the services started; `resumed` are the first ones of later owners, which pick up what others began.
    """
    parts = (tables["rollout"], tables["train"], tables["publish"], raw)
    by = [{row["iteration"]: row for row in part} for part in parts]
    found: list[Row] = []
    before: Row = {}
    saved = {commit["checkpoint_version"] for commit in tables["commits"]}
    for commit in sorted(tables["commits"], key=lambda row: row["iteration"]):
        k, fresh = commit["iteration"], commit["owner"] != before.get("owner")
        stages = {s["stage"]: s for s in tables["stages"] if s["iteration"] == k}
        row: Row = {"iteration": k}
        row["wall"] = commit["committed"] - (commit["started"] if fresh else before["committed"])
        row |= {"age": 0 if fresh else found[-1]["age"] + 1, "resumed": fresh and bool(before)}
        row |= {f"stage_{name}": s["seconds"] for name, s in stages.items()}
        row["table_bytes"] = sum(s["bytes"] for s in stages.values())
        last = max((s["committed"] for s in stages.values()), default=commit["committed"])
        row["closing"] = commit["committed"] - last
        row["checkpoint"] = k + 1 in saved  # begun here; a later commit may be the first that names it
        row["after_checkpoint"] = not fresh and found[-1]["checkpoint"]
        for table in by:
            row |= table.get(k, {})
        row |= without_raw(row)
        found.append(row | split(row) | ready(row, stages))
        before = commit
    return found


def without_raw(row: Row) -> Row:
    """The times that a raw round was part of, without it."""
    spent = row.get("raw_spent", 0.0)
    return {name: row[name] - spent for name in ("wall", "stage_rollout") if spent and name in row}


def beside_raw(table: Sequence[Row], warm: int) -> Row:
    """The run's rollouts compared with the raw rounds among the steady iterations; {} with less than two.

    `ratios`: of each iteration, tokens a second of the stage ÷ those of the raw round in turn with it.
    """
    steady = [row for row in steady_rows(table, warm) if "raw_seconds" in row]
    if len(steady) < 2:
        return {}
    ours = [float(row["generated"]) / row["stage_rollout"] for row in steady]
    ratios = [rate / (row["raw_tokens"] / row["raw_seconds"]) for rate, row in zip(ours, steady, strict=True)]
    return {
        "tokens_per_second": sum(row["raw_tokens"] for row in steady) / sum(row["raw_seconds"] for row in steady),
        "rounds": [{"tokens": row["raw_tokens"], "seconds": round(row["raw_seconds"], 4)} for row in steady],
        "requests": steady[0]["samples"],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 5),
    }


def split(row: Row) -> Row:
    """What of an iteration was generation, training, weights, and the rest.

    Generation lasts from the first request to the last answer (all of an iteration's are sent at once), but counts at
    most as long as its stage: it may begin before, while weights are written. Training is its optimizer steps; weights
    are writing and loading them, and the closing commit where a checkpoint is begun.
    """
    generation, training = min(row.get("generation") or 0.0, row.get("stage_rollout", 0.0)), row.get("steps") or 0.0
    overhead = row["wall"] - generation - training
    weights = row.get("stage_publish", 0.0) + (row["closing"] if row["checkpoint"] else 0.0)
    return {"generation": generation, "overhead": overhead, "tables_and_orchestration": overhead - weights}


def ready(row: Row, stages: dict[str, Row]) -> Row:
    """`weights_ready`: seconds from the last optimizer step to the commit of `publish`; all servers hold them by then.

    An upper bound: no clock tells when the last step ended, so the steps are taken to begin with their stage, though
    it reads its tables first. Tables, commits and Prefect's tasks in between are in it.
    """
    if "train" not in stages or "publish" not in stages:
        return {}
    return {"weights_ready": stages["publish"]["committed"] - stages["train"]["started"] - (row.get("steps") or 0.0)}


@dataclass(frozen=True)
class Cadence:
    """How often a recipe has weights and checkpoints written."""

    weights_every: int
    recover_within_seconds: float


def at_cadence(cadence: Cadence, steady: Sequence[Row]) -> Row:
    """What an iteration takes if weights and checkpoints are written at that cadence.

    A short run writes them more often than its recipe's model would: what a write and a checkpoint cost is the
    difference of the iterations with and without one, and so is what a checkpoint costs the rollout after it. A cost
    is None where it is not known: `not_seen` names what no iteration had, which is missing from the seconds; what
    every iteration had stays in them as often as it was.
    """
    checkpoints = _mean(steady, "steps") / cadence.recover_within_seconds
    write = _moved(steady, "stage_publish", "materialised", 1 / cadence.weights_every)
    checkpoint = _moved(steady, "closing", "checkpoint", checkpoints)
    after = {name: _moved(steady, name, "after_checkpoint", checkpoints) for name in ("generation", "stage_rollout")}
    return {
        "write_cost_seconds": difference(steady, "stage_publish", "materialised"),
        "checkpoint_cost_seconds": difference(steady, "closing", "checkpoint"),
        "rollout_after_checkpoint_cost_seconds": difference(steady, "stage_rollout", "after_checkpoint"),
        "not_seen": [
            name
            for name, flag in (("a write of weights", "materialised"), ("a checkpoint", "checkpoint"))
            if not _share(steady, flag)
        ],
        "overhead_seconds": _mean(steady, "overhead") + write + checkpoint,
        "generation_seconds": _mean(steady, "generation") + after["generation"],
        "rollout_stage_seconds": _mean(steady, "stage_rollout") + after["stage_rollout"],
    }


def difference(table: Sequence[Row], seconds: str, flag: str) -> float | None:
    """Mean seconds of the rows with the flag less those of the rows without, at least 0; None unless both exist."""
    have, lack = ([row for row in table if bool(row.get(flag)) is there] for there in (True, False))
    return max(0.0, _mean(have, seconds) - _mean(lack, seconds)) if have and lack else None


def _moved(table: Sequence[Row], seconds: str, flag: str, rate: float) -> float:
    """What the mean changes by if what the flag tells of came `rate` times an iteration."""
    return (difference(table, seconds, flag) or 0.0) * (rate - _share(table, flag))


def _share(table: Sequence[Row], flag: str) -> float:
    return sum(bool(row.get(flag)) for row in table) / len(table)


def without_end(table: Sequence[Row]) -> Sequence[Row]:
    """The iterations whose times count: not a last one that makes a checkpoint, for which the end of a run waits.

    A run of one iteration keeps it.
    """
    return table[:-1] if len(table) > 1 and table[-1]["checkpoint"] else table


def steady_rows(table: Sequence[Row], warm: int) -> list[Row]:
    """The iterations after the first `warm` of each start, where services and compilers still warm up."""
    found = [row for row in table if row["age"] >= warm and not row["resumed"]]
    if not found:
        raise SystemExit(f"the run has {len(table)} iterations; more than {warm} after a start are needed")
    return found


def summary(table: Sequence[Row], warm: int, cadence: Cadence) -> Row:
    """Means over the steady iterations.

    `iteration_seconds` is generation, training and the overhead at the cadence; `wall_seconds` what the clock said.
    """
    steady = steady_rows(table, warm)
    rare = at_cadence(cadence, steady)
    iteration = rare["generation_seconds"] + _mean(steady, "steps") + rare["overhead_seconds"]
    written, kept = ([row for row in steady if bool(row.get("materialised")) is there] for there in (True, False))
    return {
        "iterations": len(steady),
        "iteration_seconds": iteration,
        "wall_seconds": _mean(steady, "wall"),
        "wall_seconds_median": statistics.median(row["wall"] for row in steady),
        "generated_tokens": _mean(steady, "generated"),
        "trained_tokens": _mean(steady, "trained"),
        "mean_tokens": _mean(steady, "mean_tokens"),
        "full_length_share": _mean(steady, "full_length") / _mean(steady, "samples"),
        "rollout_tokens_per_second": _mean(steady, "generated") / rare["rollout_stage_seconds"],
        "generation_tokens_per_second": _mean(steady, "generated") / rare["generation_seconds"],
        "train_step_seconds": _mean(steady, "steps"),
        "train_stage_seconds": _mean(steady, "stage_train"),
        "train_tokens_per_second": _mean(steady, "trained") / _mean(steady, "steps"),
        "publish_stage_seconds": _mean(steady, "stage_publish"),
        "weights_load_seconds": _mean(steady, "load_seconds"),
        "weights_write_seconds": _mean(steady, "write_seconds"),
        "weights_ready_seconds": _mean(kept, "weights_ready") if kept else None,
        "weights_ready_written_seconds": _mean(written, "weights_ready") if written else None,
        **rare,
        **asdict(cadence),
        "overhead_share": rare["overhead_seconds"] / iteration,
        "tables_and_orchestration_share": _mean(steady, "tables_and_orchestration") / iteration,
        "checkpoints": sum(bool(row["checkpoint"]) for row in steady),
        "logprob_gap_mean": _mean(steady, "gap_mean"),
        "logprob_gap_max": max(row.get("gap_max") or 0.0 for row in steady),
        "ratio_outside": _mean(steady, "ratio_outside"),
        "transport": steady[-1].get("transport", ""),
    }


def _mean(table: Sequence[Row], name: str) -> float:
    return statistics.mean(float(row.get(name) or 0.0) for row in table)
