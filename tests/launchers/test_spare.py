"""The spare of a rollout worker: a process that has imported what a worker needs, and becomes one."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.service import TOKEN, ServiceSpec, registered
from areal_tasks.launchers import spare
from areal_tasks.launchers.choice import WORKER
from areal_tasks.launchers.local import LocalLauncher
from areal_tasks.launchers.protocol import Job
from areal_tasks.store.backend import open_store

RECIPE: Final = {"launcher": {"store_seconds": 600.0}}


def test_a_spare_becomes_the_worker_that_is_started_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment, folder and log of that start; it ends as any service does, and with the launcher."""
    monkeypatch.setattr(spare, "LATER_SECONDS", 0.0)
    store, launcher = open_store((tmp_path / "store").as_uri()), LocalLauncher(WORKER)
    found = launcher.spares._ready

    def job(number: int) -> Job:
        spec = ServiceSpec(name="w", restart=number, store_url=store.url, run="r", owner=1, recipe=RECIPE)
        return Job(WORKER, spec, f"token-{number}", tmp_path / f"{number}.log", threads=1)

    first = launcher.start(job(0))
    try:
        waiting = wait_until(lambda: found.get(WORKER), "a spare")
        assert TOKEN not in psutil.Process(waiting.pid).environ()
        second = launcher.start(job(1))
        assert second.process is waiting
        url = wait_until(lambda: registered(store, job(1).spec), "the second start")
        process = psutil.Process(waiting.pid)
        assert process.cwd() == second.scratch.name
        refused, answered = (
            httpx.post(f"{url}/busy", headers={"Authorization": f"Bearer token-{n}"}, timeout=LIMIT).status_code
            for n in (0, 1)
        )
        assert (refused, answered) == (401, 200)
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: second.exit_code() is not None) and second.exit_code() == -signal.SIGKILL
        third = wait_until(lambda: found.get(WORKER), "the next spare")
    finally:
        first.stop(0.0)
        launcher.close()
    assert not alive(third.pid)
    launcher.spares.prepare(WORKER, {})
    assert found == {WORKER: third}, "no spare is started any more"


def test_a_spare_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service that is started without one."""
    (tmp_path / "statistics.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    launcher = LocalLauncher(WORKER)
    launcher.spares._timers[WORKER] = threading.Timer(0, print)
    launcher.spares.prepare(WORKER, {})
    process = launcher.spares._ready[WORKER]
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(LIMIT) == 0
    launcher.close()


def test_a_spare_ends_with_the_process_that_has_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the end of its standard input."""
    monkeypatch.setattr(spare, "LATER_SECONDS", 0.0)
    launcher = LocalLauncher(WORKER)
    launcher.spares.started(WORKER, {})
    process = wait_until(lambda: launcher.spares._ready.get(WORKER), "a spare")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(LIMIT) == 0
    log = tmp_path / "log"
    assert launcher.spares.take(WORKER, {}, "token", str(tmp_path), log) is None, "one that has ended is not used"
    launcher.close()
