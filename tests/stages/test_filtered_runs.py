"""Whole runs with dynamic sampling: what is rejected, what takes its place, and what a killed flow still knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_driver import GROUPS, digests, drive, finished, left_over, start_driver, store_in, tiny
from test_asynchronous_runs import stage
from waiting import wait_until

from areal_tasks.report.page import make_report
from areal_tasks.rollout.settled import SettledGroups, settled_after
from areal_tasks.stages.generation import groups_of
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.shards import read_table
from areal_tasks.store.spool import read_spool
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe

ITERATIONS = 4

OTHERS = pytest.mark.slow("another instant of the same kill: three whole runs")


def filtered(eta: int = 0, filters: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A run that rejects groups whose samples all earn the same."""
    sections: dict[str, Any] = {
        "rollout": {"max_head_offpolicyness": eta, "group_size": 2, "filters": filters or {"equal_rewards": True}},
        "reward": {"verifier": "filtering:begins_with_a_digit"},
        "schedule": {"iterations": ITERATIONS},
        "algorithm": {"minibatches": 1, "max_logprob_gap": 9.0},
    }
    return tiny(**{**sections, **{name: sections.get(name, {}) | value for name, value in changes.items()}})


def rejections(run: Run) -> dict[int, str]:
    return {group.index: group.reason for record in read_spool(run.store, run.name) for group in record.rejected}


def check(run: Run, eta: int) -> None:
    """Each group is trained on once or rejected with a reason; verdicts are those that the filters have seen."""
    rejected, settled = rejections(run), SettledGroups()
    consumed: list[int] = []
    for k in range(ITERATIONS):
        rollout = stage(run, k, "rollout")
        groups = groups_of(run.store, rollout)
        assert len(groups) == GROUPS
        consumed += groups
        after = settled_after(run.commit(k))
        settled = settled.add(groups)
        assert {*settled.without(SettledGroups())} <= {*after.without(SettledGroups())} <= {*consumed, *rejected}
        judged = read_table(run.store, rollout.tables["judged"])
        verify = read_table(run.store, stage(run, k, "verify").tables["verify"])
        assert judged.select(verify.column_names).equals(verify)
        rewards = judged["reward"].to_pylist()
        assert all(rewards[i] != rewards[i + 1] for i in range(0, len(rewards), 2))
        lags = [k - v for v in read_table(run.store, rollout.tables["rollout"])["version_min"].to_pylist()]
        assert all(0 <= lag <= eta for lag in lags)
    assert len(set(consumed)) == len(consumed) and not set(consumed) & set(rejected)
    assert rejected and all(reason.startswith("equal_rewards: all are ") for reason in rejected.values())
    final = settled_after(run.commit(ITERATIONS - 1))
    assert set(range(final.prefix)) <= {*consumed, *rejected}
    assert audit(run.store, run.name).sound


@pytest.mark.parametrize("eta", [pytest.param(0, marks=pytest.mark.slow("the same without groups ahead")), 2])
def test_each_group_is_trained_on_once_or_rejected_with_its_reason(tmp_path: Path, eta: int) -> None:
    run = finished(tmp_path, "filtered", filtered(eta))
    check(run, eta)
    [chart] = make_report(run.store, [run.name], 1, 5_000_000).payload["runs"][0]["curves"]["rejected"]
    assert chart["name"] == "equal rewards" and len(chart["y"]) == ITERATIONS
    counted = "SELECT sum(metrics['rejected_equal_rewards']) AS n FROM stages WHERE stage = 'rollout'"
    [told] = run_sql(run.store, run.name, counted).to_pydict()["n"]
    rows = "SELECT count(*) AS n, min(reward) AS low, max(reward) AS high FROM spool WHERE state = 'rejected'"
    [row] = run_sql(run.store, run.name, rows).to_pylist()
    assert told == row["n"] if eta == 0 else 0 < told <= row["n"]  # some come after the last batch
    assert {row["low"], row["high"]} <= {0.0, 1.0}


def test_at_eta_0_each_rejection_admits_one_group_and_no_more_are_generated(tmp_path: Path) -> None:
    run = finished(tmp_path, "filtered", filtered())
    rejected, settled = rejections(run), settled_after(run.head())
    assert not settled.beyond and settled.prefix == ITERATIONS * GROUPS + len(rejected)


@pytest.mark.parametrize("die_at", ["verify 1", pytest.param(21, marks=OTHERS), pytest.param(34, marks=OTHERS)])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, die_at: int | str) -> None:
    finished(tmp_path, "filtered", filtered())
    start_driver(tmp_path, "killed", filtered(), die_at).wait()
    wait_until(lambda: not left_over(tmp_path))
    before = rejections(load_run(store_in(tmp_path), "killed"))
    run = drive(tmp_path, "killed", filtered())
    check(run, 0)
    assert digests(tmp_path, "killed") == digests(tmp_path, "filtered")
    named = [group.index for record in read_spool(run.store, run.name) for group in record.rejected]
    assert before.keys() <= set(named) and len(set(named)) == len(named)  # what was recorded did not begin again


@pytest.mark.parametrize("die_at", [pytest.param("rollout 2", marks=OTHERS), 40])
def test_a_killed_run_that_ran_ahead_rejects_no_group_twice(tmp_path: Path, die_at: int | str) -> None:
    recipe = filtered(2, rollout={"flush_seconds": 0.0})
    start_driver(tmp_path, "killed", recipe, die_at).wait()
    wait_until(lambda: not left_over(tmp_path))
    run = drive(tmp_path, "killed", recipe)
    check(run, 2)
    named = [group.index for record in read_spool(run.store, run.name) for group in record.rejected]
    assert len(set(named)) == len(named)


def test_filters_that_reject_everything_end_the_run_and_say_what_they_have_rejected(tmp_path: Path) -> None:
    recipe = filtered(filters={"function": "filtering:rejects_all", "max_rejected": 6})
    with pytest.raises(UserError, match=r"rejected 6 groups while no batch of 4 was filled: 6 by function \(mean"):
        drive(tmp_path, "nothing", recipe)
    run = load_run(store_in(tmp_path), "nothing")
    assert rejections(run)[0] == "function: none is wanted"
    assert run.head() is None and audit(run.store, "nothing").sound


@pytest.mark.parametrize("eta", [0, pytest.param(2, marks=pytest.mark.slow("the same with groups ahead"))])
def test_what_was_rejected_before_crashes_counts_for_the_end_of_the_run(tmp_path: Path, eta: int) -> None:
    def recipe(most: int) -> Recipe:
        filters = {"function": "filtering:rejects_all", "max_rejected": most}
        return filtered(eta, filters, rollout={"flush_seconds": 0.0})

    def recorded() -> int:
        return len(rejections(load_run(store_in(tmp_path), "nothing")))

    for some in (2, 4 * GROUPS):
        driver = start_driver(tmp_path, "nothing", recipe(10_000))
        wait_until(lambda some=some: (tmp_path / "store/nothing/run.json").exists() and recorded() >= some)
        driver.kill()
        driver.wait()
        wait_until(lambda: not left_over(tmp_path))
    most = (before := recorded()) + 3
    with pytest.raises(UserError, match=f"rejected {most} groups while no batch of 4 was filled: {most} by function"):
        drive(tmp_path, "nothing", recipe(most))
    assert recorded() < before + most, "some end that were under way then"


def test_a_filter_of_ones_own_names_its_reason(tmp_path: Path) -> None:
    recipe = filtered(filters={"function": "filtering:odd_prompts", "arguments": {"most": 4}})
    run = drive(tmp_path, "odd", recipe)
    assert set(rejections(run).values()) <= {"function: row 1 is odd", "function: row 3 is odd"}
    trained = run_sql(run.store, "odd", "SELECT DISTINCT prompt_id FROM samples").to_pydict()["prompt_id"]
    assert not {1, 3} & set(trained)


def test_a_filter_that_raises_costs_groups_their_attempts(tmp_path: Path) -> None:
    recipe = filtered(
        rollout={
            "filters": {"function": "filtering:broken"},
            "group_attempts": 1,
            "max_failed_groups": 2,
            "group_size": 2,
        }
    )
    with pytest.raises(UserError, match=r"3 of the groups have failed.*no filter today"):
        drive(tmp_path, "broken", recipe)


def test_verdicts_that_are_no_judgement_stop_the_run_and_reject_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be verified"):
        drive(tmp_path, "unverified", filtered(reward={"verifier": "stage_reward:fails"}))
    assert not rejections(load_run(store_in(tmp_path), "unverified"))


def test_a_replay_judges_what_the_filters_have_kept_by_another_reward(tmp_path: Path) -> None:
    run = finished(tmp_path, "filtered", filtered())
    other = filtered(reward={"verifier": "stage_reward:digits"})
    drive(tmp_path, "again", other, origin=Origin("filtered", 0, "replay", True, "verify"))
    again = load_run(run.store, "again")
    for k in range(ITERATIONS):
        assert groups_of(run.store, stage(again, k, "rollout")) == groups_of(run.store, stage(run, k, "rollout"))
        verifiers = read_table(run.store, stage(again, k, "verify").tables["verify"])["verifier"].to_pylist()
        assert set(verifiers) == {"stage_reward:digits"}
