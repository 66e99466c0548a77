"""Iterations go on while a checkpoint is written; whatever fails meanwhile, no bit and no commit depends on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import saving_trainer
from saving_trainer import DIES
from stage_driver import Digests, digests, drive, start_marked, store_in, tiny
from waiting import LIMIT, held_back

from areal_tasks.engines import starting
from areal_tasks.engines.trainer import writing
from areal_tasks.engines.trainer.checkpoint import Saving
from areal_tasks.engines.trainer.checkpoint_files import Put
from areal_tasks.engines.trainers import stage_of
from areal_tasks.stages.build import Built
from areal_tasks.stages.checkpoint import since_checkpoint
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.store.backend import Unavailable
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import remove_planned
from areal_tasks.store.runs import Run, load_run
from schemas.recipe.recipe import Recipe

ITERATIONS = 4


def recipe(**changes: Any) -> Recipe:
    """A checkpoint is due after each iteration."""
    return tiny(
        schedule={"iterations": ITERATIONS},
        rollout={"groups": 2, "group_size": 4},
        evaluation={"every": 0, "limit": 0, "max_new_tokens": 256},
        trainer={"recover_within_seconds": 1e-6},
        **changes,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """What a run holds that waits for each checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    run = drive(folder, "r", recipe(), waits=True)
    assert saved(run) == [1, 2, 3, 4]
    return digests(folder, "r")


def saved(run: Run) -> list[int | None]:
    """The version of the checkpoint that each commit names."""
    return [checkpoint and checkpoint.version for k in range(ITERATIONS) if [checkpoint := run.commit(k).checkpoint]]


def at(label: str, act: Any) -> Execute:
    """Run `act` before the job of that label."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == label:
            act()
        return run_directly(jobs)

    return execute


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """Each checkpoint's end of writing, of an inline trainer."""
    found: list[Future[Any]] = []
    begin = writing.in_background

    def begun(*arguments: Any) -> Future[Any]:
        found.append(begin(*arguments))
        return found[-1]

    monkeypatch.setattr(writing, "in_background", begun)
    return found


def test_the_first_commit_after_its_end_names_it(tmp_path: Path, expected: Digests, writes: list[Future[Any]]) -> None:
    """The first is written when iteration 2 trains. The next holds version 3, and the last iteration waits for it."""
    with held_back(Saving, "write") as gate:

        def let_it_end() -> None:
            gate.set()
            writes[0].result(LIMIT)

        run = drive(tmp_path, "r", recipe(), at("train 2", let_it_end))
    assert digests(tmp_path, "r") == expected
    assert saved(run) == [None, None, 1, 3] and len(writes) == 2
    trained = [stage_of(run, run.commit(k), "train").metrics["train_seconds"] for k in range(ITERATIONS)]
    since = [since_checkpoint(run.commit(k)) for k in range(ITERATIONS)]
    assert since == pytest.approx([trained[0], sum(trained[:2]), sum(trained[1:3]), trained[3]])
    append_log(run.store, "r", "finished", {"owner": run.owner})
    assert audit(run.store, "r").sound and not plan_removals(run.store, RetentionRule(older_than=0.0))


def die_while_writing(folder: Path) -> None:
    """The first checkpoint is never written; the flow is killed when iteration 2 trains."""
    put_file = LocalBackend.put_file

    def hang(store: LocalBackend, path: str, source: Path) -> None:
        if "/checkpoints/" in path:
            threading.Event().wait()
        put_file(store, path, source)

    LocalBackend.put_file = hang  # type: ignore[method-assign]
    drive(folder, "r", recipe(), at("train 2", lambda: os.kill(os.getpid(), signal.SIGKILL)))


def test_a_flow_that_is_killed_meanwhile_goes_on_without_it(tmp_path: Path, expected: Digests) -> None:
    process = start_marked(tmp_path, die_while_writing, tmp_path)
    process.join()
    assert process.exitcode == -9
    run = load_run(store_in(tmp_path), "r")
    assert run.committed == 2 and [run.commit(k).checkpoint for k in range(2)] == [None, None]
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == expected and saved(run)[-1] is not None
    append_log(run.store, "r", "finished", {"owner": run.owner})
    rule = RetentionRule(older_than=0.0)
    left = plan_removals(run.store, rule)
    [unfinished] = [item for item in left if "/checkpoints/version=000001/" in item.path]
    assert unfinished in remove_planned(run.store, left, rule)
    assert audit(run.store, "r").sound and not plan_removals(run.store, RetentionRule(older_than=0.0))


def test_a_trainer_that_is_killed_meanwhile_begins_another(
    tmp_path: Path, expected: Digests, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the run does when the process ends: it is restored, and no checkpoint of it is ever named."""
    dies = tmp_path / "dies"
    dies.touch()
    monkeypatch.setenv(DIES, str(dies))
    monkeypatch.setitem(starting.MODULES, starting.TRAINER, saving_trainer.__name__)
    run = drive(tmp_path, "r", recipe(launcher={"type": "local"}))
    assert not dies.exists() and digests(tmp_path, "r") == expected
    assert any(line.startswith("no checkpoint of version 1: ") for line in caplog.messages)
    named = [version for version in saved(run) if version is not None]
    assert named and 1 not in named
    logs = "".join(path.read_text() for path in (tmp_path / "logs" / "r").glob("trainer-*.log"))
    assert "copied a checkpoint in" in logs and "wrote a checkpoint in" in logs


def test_a_store_that_is_away_for_one_costs_only_that_one(
    tmp_path: Path, expected: Digests, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failures = Saving.write, list[str]()

    def fails_once(saving: Saving, put: Put) -> Any:
        if not failures:
            failures.append("the store is away")
            raise Unavailable(failures[0])
        return write(saving, put)

    monkeypatch.setattr(Saving, "write", fails_once)
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == expected
    assert [line for line in caplog.messages if "no checkpoint of version" in line] == [
        "no checkpoint of version 1: the store is away"
    ]
    assert saved(run)[0] is None and saved(run)[-1] is not None and 1 not in saved(run)
