"""What a report says that a run cost, against sums over the run's tables and records."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from stage_driver import finished, store_in, tiny, tiny_sft

from areal_tasks.engines.session import Engines
from areal_tasks.report.cost import Cost, Start, cost_of
from areal_tasks.report.page import make_report
from areal_tasks.store import paths
from areal_tasks.store.commit import read_record
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.journal import append_log, read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session
from areal_tasks.store.record_tables import requested_gpus
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from schemas.manifest import OwnerRecord, StageManifest


def cost(run: Run) -> Cost:
    with Session(run.store, run.name) as session:
        return cost_of(session.connection, run.name)


def manifests(run: Run) -> list[StageManifest]:
    """Every stage that the run's commits select, once."""
    head = run.head()
    assert head is not None
    refs = {ref.path: ref for k in range(head.iteration + 1) for ref in run.commit(k).stages}
    return [run.read_stage(ref) for ref in refs.values()]


def total(run: Run, table: str, column: str) -> int:
    """The sum over all rows of a table."""
    found = [m.tables[table] for m in manifests(run) if table in m.tables]
    return sum(sum(read_table(run.store, ref)[column].to_pylist()) for ref in found)


def seconds(since: str, until: str) -> float:
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()


def began(run: Run, n: int = 1) -> str:
    return read_record(run.store, paths.owner(run.name, n), OwnerRecord).started


def test_it_is_the_sum_over_the_tables(tmp_path: Path) -> None:
    run = finished(tmp_path, "tiny", tiny())
    found = cost(run)
    assert found.generated == total(run, "rollout", "num_generated") > 0
    assert found.evaluated == total(run, "evaluate", "num_generated") > 0
    assert found.trained == total(run, "train_steps", "tokens") > 0
    assert found.computed == total(run, "train_steps", "total_tokens") > found.trained
    stages = defaultdict[str, float](float)
    for made in manifests(run):
        stages[made.stage] += seconds(made.provenance.started, made.provenance.committed)
    assert found.stages == pytest.approx(stages) and found.iterations == 3
    head = run.head()
    assert head is not None
    assert found.seconds == pytest.approx(seconds(began(run), head.provenance.committed))
    assert [start.ended_by for start in found.starts] == ["last commit"] and found.gpu_seconds == 0


def test_supervised_runs_generate_nothing(tmp_path: Path) -> None:
    run = finished(tmp_path, "taught", tiny_sft())
    found = cost(run)
    assert (found.generated, found.evaluated) == (0, 0)
    assert found.trained == total(run, "train_steps", "tokens") > 0 and found.stages["batch"] > 0


def test_gpu_seconds_are_those_of_the_recorded_placement(tmp_path: Path) -> None:
    """The second start had two GPUs, of which two services shared one, until it was cancelled; the first had none."""
    run = finished(tmp_path, "tiny", tiny())
    before = cost(run).seconds
    open_run(run.store, "tiny", tiny())
    append_log(run.store, "tiny", "placed", {"owner": 2, "trainer": "0", "inference-0": "0+GPU-1f"})
    end = append_log(run.store, "tiny", "cancelled", {"owner": 2})
    found = cost(run)
    second = seconds(began(run, 2), end.time)
    assert found.starts[1] == Start(second, "cancelled", 2, "log")
    assert found.seconds == pytest.approx(before + second) and found.gpu_seconds == pytest.approx(2 * second)


def test_a_start_that_committed_nothing_and_says_nothing_is_not_counted(tmp_path: Path) -> None:
    run = finished(tmp_path, "tiny", tiny())
    before = cost(run)
    open_run(run.store, "tiny", tiny())
    found = cost(run)
    assert found.seconds == before.seconds and found.starts[1] == Start(0, "", 0, "recipe")


def test_what_a_fork_shares_with_its_parent_costs_it_nothing(tmp_path: Path) -> None:
    run = finished(tmp_path, "tiny", tiny())
    found = cost(open_run(run.store, "child", tiny(), origin=Origin("tiny", 2)))
    assert (found.generated, found.trained, found.iterations, found.stages) == (0, 0, 0, {})


def test_the_page_says_where_its_figures_are_from(tmp_path: Path) -> None:
    run = finished(tmp_path, "tiny", tiny())
    append_log(run.store, "tiny", "finished", {"owner": 1})
    open_run(run.store, "tiny", tiny())
    append_log(run.store, "tiny", "placed", {"owner": 2, "trainer": "0"})
    append_log(run.store, "tiny", "failed", {"owner": 2})
    open_run(run.store, "empty", tiny())
    shown, empty = make_report(run.store, ["tiny", "empty"], 0, 5_000_000).payload["runs"]
    facts, found = dict(shown["cost"]["facts"]), cost(run)
    assert empty["cost"] is None
    assert facts["tokens generated"] == f"{found.generated}, and {found.evaluated} in evaluations"
    assert "2 starts of the flow, 1 until logged as finished, 1 until logged as failed" in facts["wall time"]
    assert facts["GPU seconds"].endswith("1 GPU for the wall time, according to the log")
    assert {row[0] for row in shown["cost"]["stages"][1:]} == found.stages.keys()


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [
        ({}, 0),
        ({"trainer": {"ranks": 2}, "inference": {"engine": "embedded", "servers": 2}}, 0),
        ({"trainer": {"ranks": 2, "gpus": [0, 1]}}, 2),
        ({"trainer": {"ranks": 2}, "inference": {"engine": "sglang", "servers": 2, "tensor_parallel": 2}}, 6),
        ({"trainer": {"gpus": [0]}, "inference": {"engine": "sglang", "gpus": [0]}}, 1),
        ({"trainer": {"ranks": 1}, "inference": {"engine": "sglang", "servers": 2, "gpus": [1, 1]}}, 2),
        ({"inference": {"engine": "sglang", "servers": 2, "tensor_parallel": 1}}, 2),
    ],
)
def test_gpus_that_a_recipe_asks_for(recipe: dict[str, Any], gpus: int) -> None:
    assert requested_gpus(recipe) == gpus


@pytest.mark.parametrize(("visible", "trainer"), [("5,3", "5"), ("", None)])
def test_engines_record_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, trainer: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recipe = tiny()
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        monkeypatch.setattr(engines.supervisor, "start", lambda *_, **__: None)
        engines.begin()
    recorded = [("placed", {"owner": 1, "trainer": trainer})] if trainer else []
    assert [(line.action, line.details) for line in read_log(run.store, "r")] == recorded
