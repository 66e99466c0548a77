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
    "commits": "SELECT iteration, epoch(started) AS started, epoch(committed) AS committed, checkpoint_version "
    "FROM commits",
    "stages": "SELECT iteration, stage, seconds, bytes, epoch(committed) AS committed, reused FROM stages",
    "rollout": "SELECT iteration, count(*) AS samples, sum(num_generated) AS generated, sum(num_tokens) AS tokens, "
    "max(seconds) AS generation, avg(num_tokens) AS mean_tokens, "
    "count(*) FILTER (stop_reason = 'length') AS full_length FROM rollout GROUP BY 1",
    "train": "SELECT iteration, sum(total_tokens) AS trained, sum(step_seconds) AS steps, "
    "avg(logprob_gap_mean) AS gap_mean, max(logprob_gap_max) AS gap_max, avg(ratio_outside) AS ratio_outside "
    "FROM train_steps GROUP BY 1",
    "publish": "SELECT iteration, transport, materialised, bytes AS weight_bytes, write_seconds, "
    "coalesce(list_max(load_seconds), 0) AS load_seconds FROM publish",
}


def iteration_rows(store: Store, run: str) -> list[Row]:
    """One row per iteration of a run."""
    return join({name: rows(store, run, query) for name, query in QUERIES.items()})


def join(tables: dict[str, list[Row]]) -> list[Row]:
    """One row per iteration: `wall` is the time between two commits (the first: since its own start)."""
    by = {name: {row["iteration"]: row for row in tables[name]} for name in ("rollout", "train", "publish")}
    found, before = [], None
    for commit in sorted(tables["commits"], key=lambda row: row["iteration"]):
        k = commit["iteration"]
        stages = [s for s in tables["stages"] if s["iteration"] == k]
        row: Row = {"iteration": k, "wall": commit["committed"] - (before or commit["started"])}
        row |= {f"stage_{s['stage']}": s["seconds"] for s in stages}
        row["table_bytes"] = sum(s["bytes"] for s in stages)
        row["closing"] = commit["committed"] - max((s["committed"] for s in stages), default=commit["committed"])
        row["checkpoint"] = commit["checkpoint_version"] == k + 1
        for table in by.values():
            row |= table.get(k, {})
        found.append(row | split(row))
        before = commit["committed"]
    return found


def split(row: Row) -> Row:
    """What of an iteration was generation, training, weights, and the rest.

    Generation lasts from the first request to the last answer (all of an iteration's are sent at once); training is
    its optimizer steps; weights are writing and loading them, and the closing commit where it waits for a checkpoint.
    """
    generation, training = row.get("generation") or 0.0, row.get("steps") or 0.0
    overhead = row["wall"] - generation - training
    weights = row.get("stage_publish", 0.0) + (row["closing"] if row["checkpoint"] else 0.0)
    return {"overhead": overhead, "tables_and_orchestration": overhead - weights}


@dataclass(frozen=True)
class Cadence:
    """How often a recipe has weights and checkpoints written."""

    weights_every: int
    recover_within_seconds: float


def overhead_at(cadence: Cadence, steady: Sequence[Row]) -> Row:
    """What an iteration costs beside generation and training if weights and checkpoints are written at that cadence.

    A short run writes them more often than its recipe's model would: what a write and a checkpoint cost is the
    difference of the iterations with and without one. Where every iteration writes weights, all of it counts.
    """
    write = _difference(steady, "stage_publish", "materialised")
    checkpoint = _difference(steady, "closing", "checkpoint")
    often = write * _share(steady, "materialised") + checkpoint * _share(steady, "checkpoint")
    rare = write / cadence.weights_every + checkpoint * _mean(steady, "steps") / cadence.recover_within_seconds
    overhead = _mean(steady, "overhead") - often + rare
    return {"write_cost_seconds": write, "checkpoint_cost_seconds": checkpoint, "overhead_seconds": overhead}


def _difference(table: Sequence[Row], seconds: str, flag: str) -> float:
    """Mean seconds of the rows with the flag, less those of the rows without; 0 unless there are both."""
    have, lack = ([row for row in table if bool(row.get(flag)) is there] for there in (True, False))
    return _mean(have, seconds) - _mean(lack, seconds) if have and lack else 0.0


def _share(table: Sequence[Row], flag: str) -> float:
    return sum(bool(row.get(flag)) for row in table) / len(table)


def summary(table: Sequence[Row], warm: int, cadence: Cadence) -> Row:
    """Means over the iterations after the first `warm`, where services and compilers still warm up.

    `iteration_seconds` is generation, training and the overhead at the cadence; `wall_seconds` what the clock said.
    """
    steady = [row for row in table if row["iteration"] >= warm]
    if not steady:
        raise SystemExit(f"the run has {len(table)} iterations; more than {warm} are needed")
    generation, rare = _mean(steady, "generation"), overhead_at(cadence, steady)
    iteration = generation + _mean(steady, "steps") + rare["overhead_seconds"]
    return {
        "iterations": len(steady),
        "iteration_seconds": iteration,
        "wall_seconds": _mean(steady, "wall"),
        "wall_seconds_median": statistics.median(row["wall"] for row in steady),
        "generated_tokens": _mean(steady, "generated"),
        "trained_tokens": _mean(steady, "trained"),
        "mean_tokens": _mean(steady, "mean_tokens"),
        "full_length_share": _mean(steady, "full_length") / _mean(steady, "samples"),
        "generation_seconds": generation,
        "rollout_stage_seconds": _mean(steady, "stage_rollout"),
        "rollout_tokens_per_second": _mean(steady, "generated") / _mean(steady, "stage_rollout"),
        "generation_tokens_per_second": _mean(steady, "generated") / generation,
        "train_step_seconds": _mean(steady, "steps"),
        "train_stage_seconds": _mean(steady, "stage_train"),
        "train_tokens_per_second": _mean(steady, "trained") / _mean(steady, "steps"),
        "publish_stage_seconds": _mean(steady, "stage_publish"),
        "weights_load_seconds": _mean(steady, "load_seconds"),
        "weights_write_seconds": _mean(steady, "write_seconds"),
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
