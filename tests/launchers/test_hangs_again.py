"""A service that hangs as often as it is started again, within one wait, is ended each time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest
from flying_clock import SETTINGS, FlyingClock, poll_often
from stage_driver import store_in, tiny
from waiting import wait_until

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.session import Engines
from areal_tasks.engines.watchdog import Heartbeat
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store.opening import open_run

RESTARTS = 2
NAME = "ready"


@pytest.mark.slow("waits for three hangs; tests/stages/test_watchdog.py waits for one")
def test_a_service_that_hangs_again_and_again_is_ended_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll_often(monkeypatch)
    recipe = tiny(launcher={**SETTINGS, "restarts": RESTARTS})
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        supervisor, clock = engines.supervisor, FlyingClock(engines.watchdog)
        supervisor.start("small_service", spec(run.store.url))
        with engines.watchdog.waiting("work without end", looks_at(supervisor)):
            for _ in range(RESTARTS):
                hang_until_ended(supervisor, clock)
            hang_until_ended(supervisor, clock)
            with pytest.raises(ServiceFailed, match=r"failed 3 times; launcher\.restarts allows no more"):
                supervisor.poll([NAME])


def spec(store_url: str) -> ServiceSpec:
    return ServiceSpec(name=NAME, restart=0, store_url=store_url, run="r", owner=1, recipe={})


def looks_at(supervisor: Supervisor) -> Callable[[], Mapping[str, Heartbeat]]:
    """A poll of the service, which is healthy if it answers at all."""

    def poll() -> dict[str, Heartbeat]:
        try:
            httpx.get(f"{supervisor.services[NAME].url}/about", timeout=0.1)  # late is silent, not yet hung
        except httpx.TransportError as error:  # it hangs, is gone, or has no address yet
            return {NAME: Heartbeat(None, repr(error))}
        return {NAME: Heartbeat(object(), "it answers")}

    return poll


def hang_until_ended(supervisor: Supervisor, clock: FlyingClock) -> None:
    """Stop the service's process once it is ready, and wait for its end."""
    supervisor.wait([NAME])
    handle = supervisor.services[NAME].handle
    assert isinstance(handle, LocalHandle)
    clock.stop(handle)
    wait_until(lambda: handle.exit_code() is not None, "the end of what hangs")
    assert handle.exit_code() == -signal.SIGKILL
