"""Time for a watchdog that flies while a process stands still.

So a deadline that no healthy service misses on a busy machine is soon over for one that is stopped.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from areal_tasks.engines import watchdog as watchdog_module
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.local import LocalHandle

#: Of the recipe's `launcher`, for tests with such a clock.
SETTINGS = {"type": "local", "warn_seconds": 20.0, "hang_seconds": 120.0}
STEP_SECONDS = 15.0


def look_often(patch: pytest.MonkeyPatch) -> None:
    """For watchdogs that are made from here on."""
    patch.setattr(watchdog_module, "POLLS", 400)


class FlyingClock:
    """The watchdog's clock: the monotonic one, and STEP_SECONDS for each look while a process is stopped."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._flown = 0.0
        self._stopped: LocalHandle | None = None
        self._look = watchdog.look
        watchdog.clock, watchdog.look = self, self._fly  # type: ignore[method-assign]

    def __call__(self) -> float:
        return time.monotonic() + self._flown

    def stop(self, handle: LocalHandle) -> None:
        """Stop a service's process: nobody but the watchdog ends it."""
        os.killpg(handle.process.pid, signal.SIGSTOP)
        self._stopped = handle

    def _fly(self) -> None:
        if self._stopped is not None and self._stopped.exit_code() is None:
            self._flown += STEP_SECONDS
        self._look()
