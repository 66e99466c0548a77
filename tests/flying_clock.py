"""A clock for the watchdog that runs fast while a process is stopped.

A deadline that no healthy service misses on a busy machine is then soon over for a stopped one.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from areal_tasks.engines import watchdog as watchdog_module
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.local import LocalHandle

#: The recipe's section `launcher` for tests with this clock.
SETTINGS = {"type": "local", "warn_seconds": 20.0, "hang_seconds": 120.0}
STEP_SECONDS = 15.0


def poll_often(patch: pytest.MonkeyPatch) -> None:
    """Have watchdogs that are made from now on poll every 1/400 of their intervals."""
    patch.setattr(watchdog_module, "POLLS", 400)


class FlyingClock:
    """The watchdog's clock: the monotonic one, and STEP_SECONDS for each poll while a process is stopped."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._flown = 0.0
        self._stopped: LocalHandle | None = None
        self._poll = watchdog.poll_all
        watchdog.clock, watchdog.poll_all = self, self._fly  # type: ignore[method-assign]

    def __call__(self) -> float:
        return time.monotonic() + self._flown

    def stop(self, handle: LocalHandle) -> None:
        """Stop a service's process, which only the watchdog ends."""
        os.killpg(handle.process.pid, signal.SIGSTOP)
        self._stopped = handle

    def _fly(self) -> None:
        if self._stopped is not None and self._stopped.exit_code() is None:
            self._flown += STEP_SECONDS
        self._poll()
