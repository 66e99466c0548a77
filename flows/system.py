"""Samples a run's services in the background, and stores what it finds: each minute or more rarely, or at once while
someone watches."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Final

from areal_tasks.engines.sampling import Sampler
from areal_tasks.engines.session import Engines
from areal_tasks.store.system import SystemLog
from flows.background import Background

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


class System(Background):
    """Use as a context inside that of the engines."""

    seconds: ClassVar = 0.25
    what: ClassVar = "samples of the services"

    def __init__(self, engines: Engines, log: Any) -> None:
        super().__init__(log)
        self.sampler = Sampler(engines)
        self.stored = SystemLog(engines.run)
        self._began = self._sampled = self._wrote = time.monotonic()
        self._watched = self._began - WATCHED_SECONDS

    def repeat(self) -> None:
        """Look at the services; sample them and store the samples when that is due."""
        self.sampler.look()
        now = time.monotonic()
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
