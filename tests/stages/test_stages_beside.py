"""With η > 0 new weights are published, and evaluated, while the trainer trains on; whatever is killed then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stage_driver import drive, finished, left_over, start_marked, store_in
from test_asynchronous_runs import ITERATIONS, ahead, check
from waiting import LIMIT, wait_until

from areal_tasks.stages import loop
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.stage import Context
from areal_tasks.store.query import run_sql
from areal_tasks.store.reachable import newest_written, written_weights
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.weights import list_weights
from schemas.errors import UserError

RECIPE = ahead(rollout={"flush_seconds": 0.0}, evaluation={"every": 2, "limit": 8, "max_new_tokens": 3})

OTHERS = pytest.mark.slow("another instant of the same kill: two whole runs")


def stages_of(run: Run, k: int) -> list[tuple[str, int]]:
    """Stage and iteration of the manifests that a commit names, those that are made once left out."""
    manifests = map(run.read_stage, run.commit(k).stages)
    return sorted((m.stage, m.iteration) for m in manifests if m.stage not in ("initialise", "prompts"))


def check_publications(run: Run) -> None:
    """Each version was published once, evaluated as asked for, and is found."""
    check(run)
    published = run_sql(run.store, run.name, "SELECT version, iteration FROM publish ORDER BY 1").to_pylist()
    assert published == [{"version": k + 1, "iteration": k} for k in range(ITERATIONS)]
    evaluated = "SELECT DISTINCT weights_version AS v FROM evaluate ORDER BY 1"
    assert run_sql(run.store, run.name, evaluated).to_pydict()["v"] == [0, 2, 4, 6]
    assert [weights.state for weights in list_weights(run)] == ["written"] * (ITERATIONS + 1)
    made = [written_weights(run, run.commit(k)) for k in range(ITERATIONS)]
    assert [ref.version for ref in made if ref.written] == list(range(1, ITERATIONS + 1))
    assert [newest_written(run, run.commit(k)) for k in range(ITERATIONS)] == [None, *made[:-2], made[-1]]


def once_begun(label: str, waits_for: str) -> tuple[Execute, threading.Event]:
    """Holds the job of that `label` until the other one is about to run."""
    begun = threading.Event()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        labels = [job.label for job in jobs]
        if waits_for in labels:
            begun.set()
        if label in labels:
            assert begun.wait(LIMIT), f"{waits_for} waits for {label}"
        return run_directly(jobs)

    return execute, begun


@pytest.mark.parametrize("label", ["publish 1", "evaluate version 2"])
def test_the_trainer_does_not_wait(tmp_path: Path, label: str) -> None:
    execute, begun = once_begun(label, "train 2")
    run = drive(tmp_path, "r", RECIPE, execute)
    assert begun.is_set()
    check_publications(load_run(run.store, "r"))


def test_the_next_commit_names_what_was_late_and_the_last_names_all(tmp_path: Path) -> None:
    run = finished(tmp_path, "whole", RECIPE)
    own = {"rollout", "verify", "advantage", "reference", "train", "scalars"}
    for k in range(ITERATIONS):
        found = {(stage, at) for stage, at in stages_of(run, k) if stage not in own | {"proximal"}}
        late = {("publish", k - 1)} if k else set()
        last = {("publish", k)} if k == ITERATIONS - 1 else set()
        assert found == late | last | ({("evaluate", k)} if k % 2 == 0 or last else set())
        commit = run.commit(k)
        assert commit.weights.written is bool(last)
        assert (commit.published.version if commit.published else 0) == k


def test_a_publication_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "publish 1":
            raise UserError("no room for weights")
        return run_directly(jobs)

    with pytest.raises(UserError, match="no room for weights"):
        drive(tmp_path, "r", RECIPE, execute)
    run = drive(tmp_path, "r", RECIPE)
    check_publications(load_run(run.store, "r"))


# ── kills ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_between(publishes: bool) -> Execute:
    """Dies when iteration 2 trains. Iteration 1 is committed then; its publication is, too, or only begun: no commit
    names it."""
    done = threading.Event()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 2":
            assert not publishes or done.wait(LIMIT)
            kill()
        if jobs[0].label == "publish 1" and not publishes:
            threading.Event().wait()  # until the process is killed
        built = run_directly(jobs)
        if jobs[0].label == "publish 1":
            done.set()
        return built

    return execute


def killed_before_commit() -> Execute:
    """Dies when iteration 2 is about to be committed, whose commit would name what was late."""
    loop.Loop._commit = _dies_at(2, loop.Loop._commit)  # type: ignore[method-assign]
    return run_directly


def _dies_at(k: int, commit: Callable[..., None]) -> Callable[..., None]:
    def late(self: loop.Loop, context: Context, *arguments: object) -> None:
        if context.iteration == k:
            kill()
        commit(self, context, *arguments)

    return late


def trainer_killed() -> Execute:
    """The trainer's process dies with the weights that it kept, before they are published."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "publish 1" and not died:
            died.append(1)
            process = jobs[0].context.engines.supervisor.services["trainer"].handle.process  # type: ignore[attr-defined]
            process.kill()
            process.wait()
        return run_directly(jobs)

    died: list[int] = []
    return execute


def main(folder: Path, made: Callable[[], Execute]) -> None:
    drive(folder, "r", RECIPE, made())


def unpublished() -> Execute:
    return killed_between(publishes=False)


def unnamed() -> Execute:
    return killed_between(publishes=True)


@pytest.mark.parametrize(
    "made", [unpublished, *(pytest.param(made, marks=OTHERS) for made in (unnamed, killed_before_commit))]
)
def test_a_start_after_a_kill_publishes_what_was_not(tmp_path: Path, made: Callable[[], Execute]) -> None:
    process = start_marked(tmp_path, main, tmp_path, made)
    process.join()
    assert process.exitcode == -9
    wait_until(lambda: not left_over(tmp_path))
    drive(tmp_path, "r", RECIPE)
    check_publications(load_run(store_in(tmp_path), "r"))


def test_a_trainer_that_dies_with_what_it_kept_makes_it_again(tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"launcher": RECIPE.launcher.model_copy(update={"type": "local"})})
    drive(tmp_path, "r", recipe, trainer_killed())
    check_publications(load_run(store_in(tmp_path), "r"))
    assert {"trainer-1-1.log"} <= {path.name for path in (tmp_path / "logs" / "r").iterdir()}
