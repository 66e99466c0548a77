"""A service that hangs as often as it is started again, within one wait, is ended each time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest
from stage_driver import store_in, tiny

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.session import Engines
from areal_tasks.engines.watchdog import Sign
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store.runs import open_run

RESTARTS = 2
NAME = "ready"
#: Ten times what a look waits for an answer: a healthy service on a busy machine is not taken for one that hangs.
HANG_SECONDS = 5.0


def test_a_service_that_hangs_again_and_again_is_ended_each_time(tmp_path: Path) -> None:
    recipe = tiny(launcher={"type": "local", "warn_seconds": 0.4, "hang_seconds": HANG_SECONDS, "restarts": RESTARTS})
    run = open_run(store_in(tmp_path), "r", recipe.flow, recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        supervisor = engines.supervisor
        supervisor.start("small_service", spec(run.store.url))
        with engines.watchdog.waiting("work without end", looks_at(supervisor)):
            for _ in range(RESTARTS):
                hang_until_ended(supervisor)
            hang_until_ended(supervisor)
            with pytest.raises(ServiceFailed, match=r"failed 3 times; launcher\.restarts allows no more"):
                supervisor.look([NAME])


def spec(store_url: str) -> ServiceSpec:
    return ServiceSpec(name=NAME, restart=0, store_url=store_url, run="r", owner=1, recipe={})


def looks_at(supervisor: Supervisor) -> Callable[[], Mapping[str, Sign]]:
    """A look at the service, which is well if it answers at all."""

    def look() -> dict[str, Sign]:
        try:
            httpx.get(f"{supervisor.services[NAME].url}/about", timeout=0.5)
        except httpx.TransportError as error:  # it hangs, is gone, or has no address yet
            return {NAME: Sign(None, repr(error))}
        return {NAME: Sign(object(), "it answers")}

    return look


def hang_until_ended(supervisor: Supervisor) -> None:
    """Stop the service's process once it is ready: nobody but the watchdog ends it."""
    supervisor.wait([NAME])
    handle = supervisor.services[NAME].handle
    assert isinstance(handle, LocalHandle)
    with contextlib.suppress(ProcessLookupError):  # the watchdog was sooner, as the exit code will tell
        os.killpg(handle.process.pid, signal.SIGSTOP)
    end = time.monotonic() + 20.0 + HANG_SECONDS
    while handle.exit_code() is None:
        assert time.monotonic() < end, "it hangs, and nobody ends it"
        time.sleep(0.05)
    assert handle.exit_code() == -signal.SIGKILL
