"""Samples a run's services in the background, and stores what it finds: each minute or more rarely, or at once while
someone watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from areal_tasks.engines.sampling import Sampler
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import StoreError
from areal_tasks.store.system import SystemLog
from flows.artifacts import CLOSE_SECONDS, HURRIED_SECONDS

LOOK_SECONDS: Final = 0.25
#: Between two samples: at least, and per service, so that there are at most ten rows a second.
SAMPLE_SECONDS: Final = 5.0
SERVICE_SECONDS: Final = 0.1
#: Between two files: at first and at most. They are as far apart as a share of the time since the start, so that a
#: long run has few.
FIRST_SECONDS: Final = 60.0
LONGEST_SECONDS: Final = 600.0
SHARE: Final = 0.05
#: How long samples are stored at once after someone has said that they watch.
WATCHED_SECONDS: Final = 60.0


class System:
    """Use as a context inside that of the engines. `clock` gives seconds. `log`: where failures are logged."""

    def __init__(
        self, engines: Engines, log: Any, sampler: Sampler | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.log, self.clock = log, clock
        self.sampler = sampler or Sampler(engines)
        self.stored = SystemLog(engines.run)
        self._began = self._sampled = self._wrote = clock()
        self._watched = -WATCHED_SECONDS
        self._failing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system", daemon=True)

    def __enter__(self) -> System:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurried = error is not None and (isinstance(error, StoreError) or not isinstance(error, Exception))
        self._over.set()
        self._thread.join(HURRIED_SECONDS if hurried else CLOSE_SECONDS)

    def _work(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._guarded(self.look)
        self._guarded(self.end)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Nothing here may end a run; the first of several failures is logged."""
        try:
            work()
            self._failing = False
        except Exception as error:
            if not self._failing:
                self.log.warning("samples of the services are not in the store yet: %s", error)
            self._failing = True

    def look(self) -> None:
        """Look at the services; sample them and store the samples when that is due."""
        self.sampler.look()
        now = self.clock()
        if now - self._sampled < max(SAMPLE_SECONDS, SERVICE_SECONDS * len(self.sampler.services)):
            return
        self._sampled = now
        self.stored.add(self.sampler.sample())
        if self.stored.newly_watched():
            self._watched = now
        if now - self._watched < WATCHED_SECONDS or now - self._wrote >= self._pause(now):
            self._wrote = now
            self.stored.write()

    def _pause(self, now: float) -> float:
        return min(LONGEST_SECONDS, max(FIRST_SECONDS, SHARE * (now - self._began)))

    def end(self) -> None:
        """Sample once more, and store everything."""
        self.stored.add(self.sampler.sample())
        self.stored.write()
