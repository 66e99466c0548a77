"""Runs with real services: what is committed, what is reused, and that a kill at any instant changes no bit of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
from stage_driver import (
    GROUPS,
    ITERATIONS,
    Digests,
    digests,
    drive,
    finished,
    left_over,
    start_driver,
    store_in,
    tiny,
    tiny_evaluation,
    tiny_sft,
)
from store_listing import listed
from waiting import wait_until

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, Superseded, load_run
from schemas.errors import UserError

LOCAL = tiny(launcher={"type": "local"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`, which nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, "whole", tiny())
    return folder


@pytest.fixture(scope="module")
def expected(whole: Path) -> Digests:
    return digests(whole, "whole")


@pytest.fixture(scope="module")
def local_seconds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Digests, float]:
    """As `expected`, of services that are processes, and how long that took.

    Threads of one process share its choice of attention kernels, processes do not.
    """
    folder, began = tmp_path_factory.mktemp("local"), time.monotonic()
    drive(folder, "whole", LOCAL)
    return digests(folder, "whole"), time.monotonic() - began


@pytest.fixture(scope="module")
def expected_local(local_seconds: tuple[Digests, float]) -> Digests:
    return local_seconds[0]


def groups_by_iteration(folder: Path, name: str) -> list[list[int]]:
    rows = run_sql(
        store_in(folder), name, "SELECT iteration, group_id FROM rollout ORDER BY iteration, group_id"
    ).to_pylist()
    return [[r["group_id"] for r in rows if r["iteration"] == k] for k in sorted({r["iteration"] for r in rows})]


def test_every_iteration_is_committed_with_its_stages(whole: Path, expected: Digests) -> None:
    names = [sorted(stage for stage, _ in iteration) for iteration in expected]
    always = [
        "advantage",
        "initialise",
        "prompts",
        "publish",
        "reference",
        "rollout",
        "scalars",
        "train",
        "verify",
        "weights",
    ]
    assert names == [sorted([*always, "evaluate"]), always, sorted([*always, "evaluate", "evaluate"])]
    commit = load_run(store_in(whole), "whole").head()
    assert (
        commit is not None
        and commit.weights.version == ITERATIONS
        and commit.state["next_group"] == ITERATIONS * GROUPS
    )


def test_every_iteration_moves_the_weights(expected: Digests) -> None:
    assert len({dict(iteration)["weights"] for iteration in expected}) == ITERATIONS


def test_prompts_are_used_in_order_and_once(whole: Path) -> None:
    wanted = [[g for g in range(k * GROUPS, (k + 1) * GROUPS) for _ in range(4)] for k in range(ITERATIONS)]
    assert groups_by_iteration(whole, "whole") == wanted


def test_every_token_is_of_the_version_that_its_iteration_trains(whole: Path) -> None:
    query = "SELECT DISTINCT iteration, version_min, version_max FROM samples ORDER BY 1"
    found = [tuple(row.values()) for row in run_sql(store_in(whole), "whole", query).to_pylist()]
    assert found == [(k, k, k) for k in range(ITERATIONS)]


def test_the_same_name_again_builds_nothing(whole: Path, expected: Digests) -> None:
    def refuse(jobs: Sequence[Job]) -> list[Built]:
        raise AssertionError(f"built {jobs}")

    before = set(listed(store_in(whole), "whole"))
    run = drive(whole, "whole", tiny(), refuse)
    assert digests(whole, "whole") == expected
    assert set(listed(store_in(whole), "whole")) - before == {f"whole/owners/{run.owner}.json"}


def test_more_iterations_continue_a_run(tmp_path: Path, expected: Digests) -> None:
    drive(tmp_path, "r", tiny(schedule={"iterations": 2}))
    short = digests(tmp_path, "r")
    drive(tmp_path, "r", tiny())
    longer = digests(tmp_path, "r")
    assert longer[:2] == short and longer[2] == expected[2]
    assert [s.from_iteration for s in load_run(store_in(tmp_path), "r").segments] == [0, 2]


def test_a_longer_run_replays_its_past_with_the_learning_rates_of_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decay = {"lr_schedule": "linear", "lr_final": 0.1}
    drive(tmp_path, "r", tiny(schedule={"iterations": 2}, trainer=decay))
    with caplog.at_level("INFO", "areal_tasks"):
        drive(tmp_path, "r", tiny(trainer=decay))
    assert "retrained 2 committed iterations; largest difference in a metric: 0; in a weight: 0" in caplog.messages


def test_another_recipe_under_the_same_name_is_refused(whole: Path) -> None:
    with pytest.raises(
        UserError, match=r"'whole' exists with another recipe: rollout.temperature is 1.0 in the run and 0.5 here"
    ):
        drive(whole, "whole", tiny(rollout={"temperature": 0.5}))


def test_operational_fields_may_change(whole: Path, expected: Digests) -> None:
    drive(whole, "whole", tiny(launcher={"restarts": 7}, trainer={"recover_within_seconds": 1.0}))
    assert digests(whole, "whole") == expected


@pytest.mark.parametrize("recover_within_seconds", [3600.0, 1e-6], ids=["replayed", "from checkpoints"])
def test_killed_at_any_write_and_started_again_gives_the_same_bits(
    tmp_path: Path, expected: Digests, recover_within_seconds: float
) -> None:
    recipe = tiny(trainer={"recover_within_seconds": recover_within_seconds})
    instants: list[int] = []
    for _ in range(4):
        instants.append(random.randint(3, 70))
        process = start_driver(tmp_path, "r", recipe, instants[-1])
        process.join()
        if process.exitcode == 0:  # fewer writes than that were left
            break
        assert process.exitcode == -9, f"killed at the writes {instants}"
    drive(tmp_path, "r", recipe)
    assert digests(tmp_path, "r") == expected, f"killed at the writes {instants}"
    assert groups_by_iteration(tmp_path, "r")[-1][-1] == ITERATIONS * GROUPS - 1


def test_killed_at_any_instant_nobody_is_left_behind(tmp_path: Path, local_seconds: tuple[Digests, float]) -> None:
    expected, whole = local_seconds
    process = start_driver(tmp_path, "r", LOCAL)
    wait_until(lambda: left_over(tmp_path), "services")
    instant = random.uniform(0.0, whole)
    with suppress(TimeoutExpired):  # it may have come to its end before
        process.join(instant)
    process.kill()
    process.join()
    wait_until(lambda: not left_over(tmp_path), f"the end of all processes, killed after {instant:.2f} s")
    drive(tmp_path, "r", LOCAL)
    assert digests(tmp_path, "r") == expected, f"killed after {instant:.2f} s of {whole:.2f}"


def test_processes_killed_while_they_work_are_started_again_and_change_no_bit(
    tmp_path: Path, expected_local: Digests
) -> None:
    struck: list[str] = []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "rollout 1" and not struck:
            for name, service in jobs[0].context.engines.supervisor.services.items():
                struck.append(name)
                threading.Timer(random.uniform(0.0, 0.02), service.handle.process.kill).start()  # type: ignore[attr-defined]
        return run_directly(jobs)

    drive(tmp_path, "r", LOCAL, execute)
    assert sorted(struck) == ["inference-0", "rollout-0", "rollout-evaluation", "trainer"]
    assert digests(tmp_path, "r") == expected_local
    logs = {path.name for path in (tmp_path / "logs" / "r").iterdir()}
    assert logs == {f"{name}-1-{restart}.log" for name in struck for restart in range(2)}


def test_a_service_may_be_gone_before_any_stage(tmp_path: Path, expected: Digests) -> None:
    victims = {"train 1": "trainer", "publish 1": "trainer", "rollout 2": "inference-0", "publish 2": "trainer"}

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if (victim := victims.pop(jobs[0].label, None)) is not None:
            jobs[0].context.engines.supervisor.services[victim].handle.stop()
        return run_directly(jobs)

    drive(tmp_path, "r", tiny(), execute)
    assert not victims
    assert digests(tmp_path, "r") == expected


def test_a_start_that_was_overtaken_stops_at_its_next_commit(tmp_path: Path, expected: Digests) -> None:
    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 1":
            open_run(store_in(tmp_path), "r", tiny())
        return run_directly(jobs)

    with pytest.raises(Superseded, match="'r' has been started again since"):
        drive(tmp_path, "r", tiny(), execute)
    assert digests(tmp_path, "r") == expected[:1]
    drive(tmp_path, "r", tiny())
    assert digests(tmp_path, "r") == expected


def test_who_loses_the_commit_of_a_train_stage_goes_on_with_the_winners(
    tmp_path: Path, expected: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    won: list[Built] = []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        [built] = run_directly(jobs)
        if jobs[0].label not in ("train 0", "train 1"):
            return [built]
        with monkeypatch.context() as patch:
            patch.setattr(Run, "find_stage", lambda *arguments: None)  # the winner commits while we train
            [again] = run_directly(jobs)
        assert again.reused and again.manifest == built.manifest
        won.append(again)
        return [again]

    drive(tmp_path, "r", tiny(), execute)
    assert len(won) == 2
    assert digests(tmp_path, "r") == expected


def test_supervised_fine_tuning_that_is_killed_gives_the_same_bits(tmp_path: Path) -> None:
    finished(tmp_path, "whole", tiny_sft())
    instant = random.randint(3, 30)
    start_driver(tmp_path, "r", tiny_sft(), instant).join()
    drive(tmp_path, "r", tiny_sft())
    assert digests(tmp_path, "r") == digests(tmp_path, "whole"), f"killed at the write {instant}"
    assert [name for name, _ in digests(tmp_path, "r")[1]] == [
        "initialise",
        "prompts",
        "batch",
        "train",
        "publish",
        "weights",
    ]
    query = "SELECT list(CAST(sample_id AS INTEGER) ORDER BY iteration, minibatch, sample_id) AS places FROM batch"
    [row] = run_sql(store_in(tmp_path), "r", query).to_pylist()
    assert sorted(row["places"]) == list(range(ITERATIONS * 12))


def test_an_evaluation_of_a_runs_weights_agrees_with_the_runs_own(whole: Path, expected: Digests) -> None:
    drive(whole, "evaluated", tiny_evaluation("run://whole@2"))
    [found] = digests(whole, "evaluated")
    query = "SELECT sample_id, completion, reward FROM evaluate {} ORDER BY 1"
    own = run_sql(store_in(whole), "whole", query.format("WHERE weights_version = 2")).to_pylist()
    assert [name for name, _ in found] == ["initialise", "prompts", "evaluate", "weights"]
    assert run_sql(store_in(whole), "evaluated", query.format("")).to_pylist() == own and len(own) == 8
