"""Whole runs whose rollout workers are killed, hang, or lose their flow."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from spooled import not_as_spooled
from stage_driver import GROUPS, digests, drive, finished, left_over, start_marked, store_in, tiny
from store_listing import listed
from test_asynchronous_runs import ITERATIONS, ahead, check, die_ahead, groups_by_iteration
from waiting import wait_until

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store import spool as records
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from schemas.recipe.recipe import Recipe

NO_EVALUATION = {"every": 0, "limit": 0, "max_new_tokens": 256}


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow("two show it already"))])
def test_at_eta_0_it_makes_no_difference_how_many_workers_there_are(tmp_path: Path, count: int) -> None:
    finished(tmp_path, "one", tiny())
    drive(tmp_path, "more", tiny(rollout={"workers": count, "flush_seconds": 0.0}))
    assert [dict(k) for k in digests(tmp_path, "more")] == [dict(k) for k in digests(tmp_path, "one")]


@pytest.mark.parametrize("eta", [pytest.param(0, marks=pytest.mark.slow("the same with less under way")), 2])
@pytest.mark.parametrize(
    "how", ["leave", pytest.param("stop", marks=pytest.mark.slow("waits until a heartbeat is missed")), "block"]
)
def test_user_code_that_ends_or_blocks_its_worker_costs_no_group(tmp_path: Path, how: str, eta: int) -> None:
    workflow = {"name": "working:Misbehaving", "arguments": {"how": how, "group": 9, "folder": str(tmp_path)}}
    limits: dict[str, Any] = {  # what a busy machine delays is begun again
        "stop": {"launcher": {"type": "local", "hang_seconds": 8.0, "restarts": 1000}},
        "block": {"workflow": {**workflow, "blocked_seconds": 2.0}},
    }
    rollout = {"max_head_offpolicyness": eta, "workers": 2, "group_attempts": 2 if how == "leave" else 1000}
    base = {"workflow": workflow, "launcher": {"type": "local"}, "rollout": rollout}
    recipe = ahead(**base | limits.get(how, {}))
    drive(tmp_path, "run", recipe)
    run = load_run(store_in(tmp_path), "run")
    check(run, eta)
    assert (tmp_path / how).read_text() == str(Path.cwd())
    assert not run_sql(run.store, "run", "FROM spool WHERE state = 'rejected'").num_rows


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow("one worker has to take all in turn"))])
def test_a_group_that_always_ends_its_worker_is_rejected_and_the_run_goes_on(tmp_path: Path, workers: int) -> None:
    """No restart is left to the supervisor: the ends count against the groups in flight."""
    workflow = {"name": "working:Misbehaving", "arguments": {"how": "always", "group": 9, "folder": str(tmp_path)}}
    rollout = {"max_head_offpolicyness": 2, "workers": workers, "group_attempts": 2}
    recipe = ahead(workflow=workflow, rollout=rollout, launcher={"type": "local", "restarts": 0})
    run = drive(tmp_path, "run", recipe)
    rejected = run_sql(run.store, "run", "SELECT group_id, reason FROM spool WHERE state = 'rejected'").to_pylist()
    reason = "failed: its rollout worker ended 2 times while it generated only this group"
    assert rejected == [{"group_id": 9, "reason": reason}]
    taken = [group for groups in groups_by_iteration(run)[:ITERATIONS] for group in groups]
    assert len(taken) == len(set(taken)) and set(range(max(taken) + 1)) == {*taken, 9}


@pytest.mark.slow("some time passes until the worker has leaked enough")
def test_a_worker_that_needs_too_much_memory_is_replaced_and_no_group_begins_twice(tmp_path: Path) -> None:
    recipe = ahead(
        workflow={"name": "working:Leaking", "arguments": {"megabytes": 100, "folder": str(tmp_path)}},
        rollout={"max_head_offpolicyness": 2, "worker_memory_mb": 900, "flush_seconds": 3600.0},
        evaluation=NO_EVALUATION,  # its workflow would leak too, and write the same files
        launcher={"type": "local", "restarts": 0},
    )
    run = drive(tmp_path, "run", recipe)
    check(run)
    attempts = [path.name.split("-")[1] for path in tmp_path.glob("attempt-*")]
    assert len(attempts) == len(set(attempts)) == ITERATIONS * GROUPS
    assert len(list((tmp_path / "logs" / "run").glob("rollout-0-*.log"))) > 1


def test_a_killed_worker_costs_its_groups_in_flight_and_the_run_goes_on(tmp_path: Path) -> None:
    """SIGKILL at some instant of each iteration; what it has spooled is trained on."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label in ("verify 1", "train 2", "publish 3"):
            handle: Any = jobs[0].context.engines.supervisor.services["rollout-0"].handle
            handle.process.kill()
        return run_directly(jobs)

    recipe = ahead(
        launcher={"type": "local", "restarts": 5}, rollout={"max_head_offpolicyness": 2, "flush_seconds": 0.0}
    )
    drive(tmp_path, "killed", recipe, execute)
    check(load_run(store_in(tmp_path), "killed"))
    assert (tmp_path / "logs" / "killed" / "rollout-0-1-3.log").exists(), "it was killed three times"


@pytest.mark.parametrize(
    "record", [1, pytest.param(2, marks=pytest.mark.slow("the next record; the first one shows it"))]
)
def test_a_worker_that_is_killed_just_after_it_created_a_record_costs_none_of_its_groups(
    tmp_path: Path, record: int
) -> None:
    """The flow has not received that event: it finds the record as it closes the worker's start."""
    workflow = {"name": "working:KilledOnRecording", "arguments": {"record": record, "folder": str(tmp_path)}}
    rollout = {"max_head_offpolicyness": 2, "flush_seconds": 0.0}
    run = drive(tmp_path, "killed", ahead(workflow=workflow, launcher={"type": "local"}, rollout=rollout))
    assert (tmp_path / "killed").exists() and not_as_spooled(run.store, "killed") == []
    check(load_run(run.store, "killed"))


def test_a_worker_is_restarted_while_the_flow_does_not_wait_for_it(tmp_path: Path) -> None:
    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 2":
            handle: Any = jobs[0].context.engines.supervisor.services["rollout-0"].handle
            handle.process.kill()
            wait_until(lambda: (tmp_path / "logs" / "killed" / "rollout-0-1-1.log").exists(), "the worker's restart")
        return run_directly(jobs)

    drive(tmp_path, "killed", ahead(launcher={"type": "local"}), execute)
    check(load_run(store_in(tmp_path), "killed"))


def test_a_worker_that_loses_its_flow_leaves_what_waits_and_ends(tmp_path: Path) -> None:
    recipe = ahead(launcher={"type": "local"}, rollout={"max_head_offpolicyness": 2, "flush_seconds": 3600.0})
    start_marked(tmp_path, die_ahead, tmp_path, "lost", recipe, "publish 1").wait()
    wait_until(lambda: not left_over(tmp_path), "the services' end")
    store = store_in(tmp_path)
    [start] = range(records.number_of_starts(store, "lost"))
    waiting = {group.index for record in records.read_start(store, "lost", start) for group in record.finished}
    assert waiting
    run = drive(tmp_path, "lost", recipe)
    check(load_run(run.store, "lost"))
    assert waiting <= {group for groups in groups_by_iteration(run)[:ITERATIONS] for group in groups}


def die_beside_a_stopped_worker(folder: Path, name: str, recipe: Recipe) -> None:
    """`drive`, killed before `train 2`; its worker has recorded groups, holds others in memory, and is stopped."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        generation, label = jobs[0].context.generation, jobs[0].label
        if generation is not None and label == "train 0":
            wait_until(lambda: generation.tracker.ready() == 2 * GROUPS, "all that may begin with version 0")
            generation.hold(True)
            assert records.read_start(store_in(folder), name, 0)[-1].finished
            generation.hold(False)
        if generation is not None and label == "train 2":
            wait_until(lambda: any(group >= 3 * GROUPS for group in list(generation.tracker.finished.of)))
            handle: Any = jobs[0].context.engines.supervisor.services["rollout-0"].handle
            os.kill(handle.process.pid, signal.SIGSTOP)
            (folder / "stopped").write_text(str(handle.process.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return run_directly(jobs)

    drive(folder, name, recipe, execute)


@pytest.mark.slow("two starts; the rule that it may not write is tested by itself")
def test_a_stopped_worker_that_goes_on_under_the_next_start_changes_nothing(tmp_path: Path) -> None:
    """What it writes late is refused: its start was closed. It ends, and each group is trained on once."""
    recipe = ahead(launcher={"type": "local"}, rollout={"max_head_offpolicyness": 2, "flush_seconds": 3600.0})
    start_marked(tmp_path, die_beside_a_stopped_worker, tmp_path, "run", recipe).wait()
    zombie = psutil.Process(int((tmp_path / "stopped").read_text()))
    its_own = {zombie, *zombie.children(recursive=True)}  # its verifiers
    wait_until(lambda: its_own.issuperset(left_over(tmp_path)), "the other services' end")
    store, late = store_in(tmp_path), list[str]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 3":
            recorded, before = records.read_start(store, "run", 0), set(listed(store, "run/spool/0"))
            assert [record.kind for record in recorded] == ["opened", "groups", "closed"]
            zombie.resume()
            wait_until(lambda: not left_over(tmp_path), "the zombie's end")
            late.extend(set(listed(store, "run/spool/0")) - before)
            assert records.read_start(store, "run", 0) == recorded
        return run_directly(jobs)

    run = load_run(drive(tmp_path, "run", recipe, execute).store, "run")
    [shard] = late
    assert "/attempt=" in shard, "rows that no record names"
    assert set(pq.read_table(BytesIO(store.read(shard)))["group_id"].to_pylist()) & set(range(3 * GROUPS, 4 * GROUPS))
    check(run)
    assert not_as_spooled(store, "run") == []


OTHER_MODE = pytest.mark.slow("the same by a mode that is not the default")


@pytest.mark.parametrize("mode", ["in_place", *(pytest.param(mode, marks=OTHER_MODE) for mode in ("abort", "drain"))])
def test_new_weights_interrupt_the_requests_of_workers(tmp_path: Path, mode: str) -> None:
    changes: dict[str, Any] = {"interruption": mode, "max_head_offpolicyness": 2, "workers": 2}
    drive(tmp_path, mode, ahead(rollout=changes))
    run = load_run(store_in(tmp_path), mode)
    check(run)
    mixed = run_sql(run.store, mode, "SELECT count(*) AS n FROM samples WHERE version_max > version_min").to_pylist()
    assert mode != "drain" or mixed == [{"n": 0}]
