"""Whole runs with η > 0: what the commits hold, and what a killed flow finds again."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spooled import not_as_spooled
from stage_driver import GROUPS, drive, finished, left_over, start_driver, start_marked, store_in, tiny
from waiting import wait_until

from areal_tasks.rollout.settled import SettledGroups, settled_after
from areal_tasks.rollout.spooling import Spool
from areal_tasks.stages.build import Built
from areal_tasks.stages.generation import groups_of
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store import paths
from areal_tasks.store import spool as records
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.shards import read_table
from benchmarks.simulate import Load
from flows.alerts import AlertMonitor
from schemas.recipe.recipe import Recipe, RlhfRecipe

ETA, ITERATIONS = 2, 6

OTHERS = pytest.mark.slow("another instant of the same kill: two whole runs")


def ahead(**changes: Any) -> RlhfRecipe:
    """A run whose groups may be two versions old."""
    sections: dict[str, Any] = {
        "rollout": {"max_head_offpolicyness": ETA},
        "schedule": {"iterations": ITERATIONS},
        "algorithm": {"max_logprob_gap": 9.0},
    }
    recipe = tiny(**{**sections, **{name: sections.get(name, {}) | value for name, value in changes.items()}})
    assert isinstance(recipe, RlhfRecipe)
    return recipe


def groups_by_iteration(run: Run) -> list[list[int]]:
    return [groups_of(run.store, stage(run, k, "rollout")) for k in range(ITERATIONS)]


def stage(run: Run, k: int, name: str) -> Any:
    return run.read_stage(next(ref for ref in run.commit(k).stages if ref.stage == name))


def check(run: Run, eta: int = ETA) -> None:
    """What holds of the rows of an asynchronous run, whatever has happened to the flow."""
    consumed, settled = Counter[int](), SettledGroups()
    for k, groups in enumerate(groups_by_iteration(run)):
        rows = read_table(run.store, stage(run, k, "rollout").tables["rollout"])
        order = list(zip(rows["group_id"].to_pylist(), rows["sample_index"].to_pylist(), strict=True))
        assert order == sorted(order) and len(groups) == GROUPS
        assert all(k - eta <= version <= k for version in rows["version_min"].to_pylist())
        assert all(version <= k for version in rows["version_max"].to_pylist())
        consumed.update(groups)
        settled = settled.add(groups)
        assert settled_after(run.commit(k)) == settled
    assert sorted(consumed) == list(range(GROUPS * ITERATIONS)) and set(consumed.values()) == {1}
    assert audit(run.store, run.name).sound


def test_samples_are_no_older_than_eta_and_have_the_lengths_that_were_generated(tmp_path: Path) -> None:
    """With a heavy tail: a run that dropped or put off slow groups would train on shorter samples."""
    drawn = {"median": 4.0, "sigma": 1.0, "longest": 24}
    room = {"rollout": {"max_new_tokens": 24}, "model": {"max_length": 32}}

    def execute(jobs: Sequence[Job]) -> list[Built]:
        generation = jobs[0].context.generation
        if generation is not None and jobs[0].label == "train 0":
            wait_until(lambda: generation.tracker.ready() == ETA * GROUPS, "all that may begin with these weights")
        return run_directly(jobs)

    recipe = ahead(workflow={"name": "benchmarks.gpu.drawn:Drawn", "arguments": drawn}, **room)
    run = drive(tmp_path, "ahead", recipe, execute)
    check(run)
    lags = run_sql(run.store, "ahead", "SELECT DISTINCT iteration - version_min AS lag FROM samples").to_pydict()["lag"]
    assert max(lags) == ETA
    lengths = (
        "SELECT list(num_generated ORDER BY sample_index) AS found FROM samples GROUP BY group_id ORDER BY group_id"
    )
    load = Load(group_size=recipe.rollout.group_size, **drawn)
    trained = run_sql(run.store, "ahead", lengths).to_pydict()["found"]
    assert trained == [load.lengths(group) for group in range(GROUPS * ITERATIONS)]


@pytest.mark.slow("a whole run; the rule itself has tests of its own")
def test_by_the_weaker_rule_groups_are_taken_once_and_their_lag_is_recorded(tmp_path: Path) -> None:
    """Also a group that is slow: training does not wait for it, and it is older than η when it is trained on."""
    eta, late = 1, {"name": "working:Late", "arguments": {"group": 1, "version": 4}}
    recipe = ahead(
        rollout={"max_head_offpolicyness": eta, "bound": "admission"},
        workflow=late,
        evaluation={"every": 0, "limit": 0, "max_new_tokens": 256},  # of version 0 it would wait for ever
        alerts={"max_lag_beyond": 2.0},
    )
    run = drive(tmp_path, "weaker", recipe)
    assert sorted(group for of in groups_by_iteration(run) for group in of) == list(range(GROUPS * ITERATIONS))
    lags = "SELECT iteration, group_id, lag, iteration - version_min AS age FROM samples"
    found = run_sql(run.store, "weaker", lags).to_pylist()
    assert all(row["lag"] == row["age"] >= 0 for row in found)
    [(taken, lag)] = {(row["iteration"], row["lag"]) for row in found if row["group_id"] == 1}
    assert taken == lag >= 4 > eta, "it began with version 0"
    metrics = [stage(run, k, "train").metrics for k in range(ITERATIONS)]
    assert metrics[taken]["lag_max"] == lag
    watch = AlertMonitor(recipe.alerts)
    shown = [k for k, one in enumerate(metrics) for alert in watch({"train": one}, eta) if alert.cause == "old-samples"]
    assert shown == [taken]
    assert audit(run.store, run.name).sound


@pytest.mark.slow("four whole runs")
def test_forks_may_become_asynchronous_and_synchronous_again(tmp_path: Path) -> None:
    """A commit tells its successor all that it must know, whatever η there is."""
    drive(tmp_path, "first", tiny(schedule={"iterations": 2}))
    drive(tmp_path, "second", ahead(schedule={"iterations": 4}), origin=Origin("first", 2))
    synchronous = ahead(rollout={"max_head_offpolicyness": 0})
    run = drive(tmp_path, "third", synchronous, origin=Origin("second", 4))
    check(load_run(run.store, "third"))
    versions = "SELECT iteration, min(version_min) AS version FROM samples GROUP BY 1 ORDER BY 1"
    oldest = run_sql(run.store, "third", versions).to_pydict()["version"]
    assert [oldest[k] for k in (0, 1, 4, 5)] == [0, 1, 4, 5]


@pytest.mark.parametrize(
    "die_at", ["rollout 3", *(pytest.param(at, marks=OTHERS) for at in ("train 2", "publish 2", 40, 55, 70))]
)
def test_a_killed_flow_goes_on_with_what_waits_in_the_store(tmp_path: Path, die_at: int | str) -> None:
    recipe = ahead(rollout={"flush_seconds": 0.0})
    start_driver(tmp_path, "killed", recipe, die_at).wait()
    wait_until(lambda: not left_over(tmp_path))
    store = store_in(tmp_path)
    drive(tmp_path, "killed", recipe)
    check(load_run(store, "killed"))


def die_ahead(folder: Path, name: str, recipe: Recipe, label: str) -> None:
    """`drive`, killed before the job of that label once a group waits that no iteration has taken by then."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        generation = jobs[0].context.generation
        if generation is not None and jobs[0].label == label:
            tracker = generation.tracker
            wait_until(lambda: any(i >= 2 * GROUPS for i in list(tracker.finished.of)))
            os.kill(os.getpid(), signal.SIGKILL)
        return run_directly(jobs)

    drive(folder, name, recipe, execute)


def test_what_waited_is_trained_on_as_it_was_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the spool are found again in the tables of iterations, bitwise: they were not generated twice."""
    recipe = ahead(rollout={"flush_seconds": 0.0})
    start_marked(tmp_path, die_ahead, tmp_path, "killed", recipe, "train 1").wait()
    wait_until(lambda: not left_over(tmp_path))
    store = store_in(tmp_path)
    waiting = [
        r for n in range(records.number_of_starts(store, "killed")) for r in records.read_start(store, "killed", n)
    ]
    rows = {
        row["sample_id"]: row for r in waiting for t in r.tables.values() for row in read_table(store, t).to_pylist()
    }
    states = "SELECT DISTINCT state FROM spool WHERE group_id >= 8"
    assert run_sql(store, "killed", states).to_pydict() == {"state": ["waiting"]}
    with monkeypatch.context() as patch:
        patch.setattr("areal_tasks.rollout.made_with.GROUP_FIELDS", ("workflow",))
        assert run_sql(store, "killed", states).to_pydict() == {"state": ["dropped"]}
    run = drive(tmp_path, "killed", recipe)
    trained = [
        row
        for k in range(ITERATIONS)
        for row in read_table(store, stage(run, k, "rollout").tables["rollout"]).to_pylist()
    ]
    taken = [row for row in trained if row["group_id"] >= 2 * GROUPS and row["sample_id"] in rows]
    assert taken and all(row == rows[row["sample_id"]] for row in taken)
    assert not_as_spooled(store, "killed") == []


def test_a_start_that_ignores_what_waits_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the kill matrix asks of a run's spool, and by nothing else: one record is ignored."""
    recipe = ahead(rollout={"flush_seconds": 0.0})
    start_marked(tmp_path, die_ahead, tmp_path, "killed", recipe, "train 1").wait()
    wait_until(lambda: not left_over(tmp_path))
    store, recover, ignored = store_in(tmp_path), Spool.recover, set[int]()

    def ignoring(spool: Spool, settled: SettledGroups) -> Any:
        waiting, rejected = recover(spool, settled)
        records = spool.records(waiting)
        ignored.update(group.index for one in records[:1] for group in one.finished)
        spool.forget(ignored)
        return {group: version for group, version in waiting.items() if group not in ignored}, rejected

    monkeypatch.setattr(Spool, "recover", ignoring)
    check(drive(tmp_path, "killed", recipe))
    assert ignored and not_as_spooled(store, "killed") == sorted(ignored)


def test_a_held_run_begins_nothing_ahead_and_its_finished_groups_are_in_the_store(tmp_path: Path) -> None:
    """Held while it trains, as by a pause; stages that follow none the less take what they need and leave nothing."""
    left: dict[str, int] = {}

    def execute(jobs: Sequence[Job]) -> list[Built]:
        generation, label = jobs[0].context.generation, jobs[0].label
        if label == "train 1":
            assert generation is not None
            wait_until(lambda: generation.tracker.ready() > GROUPS, "groups that wait")
            generation.hold(True)
            store = store_in(tmp_path)
            wait_until(lambda: any(record.finished for record in records.read_start(store, "held", 0)), "the store")
        if generation is not None and label.startswith("train"):
            left[label] = generation.tracker.live()
        if label == "train 3":
            generation.hold(False)
            wait_until(lambda: generation.tracker.live() > GROUPS, "groups ahead")
        return run_directly(jobs)

    run = drive(tmp_path, "held", ahead(rollout={"flush_seconds": 3600.0}), execute)
    assert left["train 1"] > GROUPS >= left["train 3"], "no more than the next iteration takes"
    check(run)


def test_a_fork_has_a_spool_of_its_own(tmp_path: Path) -> None:
    parent = drive(tmp_path, "parent", ahead(rollout={"flush_seconds": 0.0}))
    child = drive(tmp_path, "child", ahead(), origin=Origin("parent", 3))
    check(load_run(parent.store, "child"))
    assert child.commit(3).state.get("spool", [[0, 0]])[0][0] == 0
    assert not parent.store.exists(paths.spool_record("child", 0, 0)) or child.store.exists("child/run.json")


@pytest.mark.slow("three whole runs")
def test_a_replay_keeps_the_groups_whatever_their_age(tmp_path: Path) -> None:
    run = finished(tmp_path, "ahead", ahead())
    drive(
        tmp_path, "again", ahead(algorithm={"clip_ratio": 0.1}), origin=Origin("ahead", 0, "replay", True, "advantage")
    )
    assert groups_by_iteration(load_run(run.store, "again")) == groups_by_iteration(run)


@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 10))
@settings(max_examples=30)
def test_commits_say_which_groups_are_settled(beyond: list[int], prefix: int) -> None:
    settled = SettledGroups(prefix).add(beyond)
    assert SettledGroups(settled.prefix, frozenset(sorted(settled.beyond))) == settled
