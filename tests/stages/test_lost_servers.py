"""One of two servers, real processes, is killed amid an asynchronous run: nothing waits until it is back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_driver import drive, tiny
from waiting import LIMIT, wait_until

from areal_tasks.engines import session
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.local import LocalHandle, LocalLauncher
from areal_tasks.launchers.protocol import Job as Start
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.parallel import in_background
from schemas.recipe.load import parse_recipe

ETA, KILLED_AFTER, LAST = 2, 1, 7


def test_a_run_goes_on_while_a_server_that_was_killed_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the trainer's GPU: the trainer has its memory already, and need not leave it the first go.

    The new start is held back until further iterations than η have been trained.
    """
    placement = Placement(("0",), (("0",), ("1",)))
    monkeypatch.setattr(session, "place_recipe", lambda *_: placement)
    starts: list[LocalHandle] = []
    go_on, done, start = threading.Event(), threading.Event(), LocalLauncher.start

    def held_back(launcher: LocalLauncher, job: Start) -> LocalHandle:
        again = job.spec.name == "inference-0" and starts
        assert not again or go_on.wait(LIMIT)
        handle = start(launcher, job)
        starts.extend([handle] if job.spec.name == "inference-0" else [])
        return handle

    def execute(jobs: Sequence[Job]) -> list[Built]:
        built = run_directly(jobs)
        if jobs[0].label == f"train {KILLED_AFTER}":
            os.killpg(starts[0].process.pid, signal.SIGKILL)
        if jobs[0].label == f"train {LAST}":
            done.set()
        return built

    monkeypatch.setattr(LocalLauncher, "start", held_back)
    sections = {"rollout": {"max_head_offpolicyness": ETA}, "inference": {"servers": 2}, "launcher": {"type": "local"}}
    values = tiny(**sections, schedule={"iterations": LAST + 1}).model_dump(mode="json", exclude_unset=True)
    recipe = parse_recipe({name: value for name, value in values.items() if name != "evaluation"})
    run = in_background(lambda: drive(tmp_path, "r", recipe, execute), "run")
    try:
        wait_until(lambda: done.is_set() or run.done(), "the iterations after the kill", LIMIT / 2)
    finally:
        go_on.set()
    assert run.result(LIMIT).head() is not None and done.is_set()
