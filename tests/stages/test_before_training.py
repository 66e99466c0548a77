"""What an iteration does before it needs the trainer is done while the one before trains."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_driver import drive, left_over, start_marked, store_in
from store_listing import listed
from test_asynchronous_runs import ITERATIONS, ahead, check, stage
from waiting import wait_until

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe

BEFORE_TRAINING = ("rollout", "verify", "advantage")


class Watched:
    """Runs jobs, and notes the labels of those that are done. `trains` is called before a training."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].stage.name == "train":
            self.trains(jobs[0].context.iteration)
        built = run_directly(jobs)
        self.done += [job.label for job in jobs]
        return built

    def trains(self, k: int) -> None:
        if k + 1 < ITERATIONS:
            wait_until(lambda: self.ready(k + 1), f"iteration {k + 1}, all but its training")

    def ready(self, k: int) -> bool:
        return {f"{name} {k}" for name in BEFORE_TRAINING} <= set(self.done)


def test_each_iteration_is_ready_for_its_training_before_the_training_before_has_ended(tmp_path: Path) -> None:
    """Else the trainings here would wait for ever."""
    run = drive(tmp_path, "ahead", ahead(), Watched())
    check(run)
    for k in range(1, ITERATIONS):
        assert stage(run, k, "rollout").provenance.started < stage(run, k - 1, "train").provenance.committed


class Killed(Watched):
    def trains(self, k: int) -> None:
        super().trains(k)
        if k == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def drive_and_die(folder: Path, recipe: Recipe) -> None:
    drive(folder, "killed", recipe, Killed())


def test_what_was_ready_when_the_flow_was_killed_is_used_as_it_is(tmp_path: Path) -> None:
    recipe = ahead()
    start_marked(tmp_path, drive_and_die, tmp_path, recipe).wait()
    wait_until(lambda: not left_over(tmp_path))
    store = store_in(tmp_path)
    before = {path for path in listed(store, "killed/iteration=000003") if path.endswith(".json")}
    assert len(before) == len(BEFORE_TRAINING) and load_run(store, "killed").committed == 2
    watched = Watched()
    run = drive(tmp_path, "killed", recipe, watched)
    check(run)
    assert before <= {ref.path for ref in run.commit(3).stages}


class Failing(Watched):
    """The training of iteration 2 fails while the rollout of 3 waits for groups."""

    def trains(self, k: int) -> None:
        if k == 2:
            raise UserError("no training today")


def threads_ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ahead"]


def test_a_training_that_fails_ends_what_goes_on_beside_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training today"):
        drive(tmp_path, "failed", ahead(), Failing())
    wait_until(lambda: not threads_ahead(), "the end of what was begun ahead")
    run = drive(tmp_path, "failed", ahead())
    check(run)


class Unverified(Watched):
    """The verification of iteration 3 fails, which was begun while 2 trains."""

    def __call__(self, jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "verify 3":
            raise UserError("nothing can be verified")
        return super().__call__(jobs)

    def trains(self, k: int) -> None:
        return


def test_what_fails_ahead_fails_the_iteration_that_it_belongs_to(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing can be verified"):
        drive(tmp_path, "failed", ahead(), Unverified())
    run = load_run(store_in(tmp_path), "failed")
    assert run.committed == 3, "the iteration that trained meanwhile is committed"
    check(drive(tmp_path, "failed", ahead()))


class Slow(Watched):
    """Each publication ends after the next iteration's rollout has found that no group may begin."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    def __call__(self, jobs: Sequence[Job]) -> list[Built]:
        self.begun += [job.label for job in jobs]
        if jobs[0].stage.name == "publish" and (k := jobs[0].context.iteration) + 2 < ITERATIONS:
            wait_until(lambda: f"rollout {k + 2}" in self.begun, "the rollout that needs these weights")
        return super().__call__(jobs)


def test_a_rollout_waits_for_weights_that_are_being_published(tmp_path: Path) -> None:
    """With η = 1 no group of iteration k + 1 may begin before the servers hold version k."""
    slow = Slow()
    run = drive(tmp_path, "slow", ahead(rollout={"max_head_offpolicyness": 1}), slow)
    check(run, 1)
    assert len(slow.begun) == len(set(slow.begun)), "no stage failed and was repeated"
