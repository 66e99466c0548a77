"""Work that is repeated in a thread during a run: copies of its services' logs, and samples of what they do.

Logs are copied into the store while they grow, so that a crash loses their last minute only. Samples are stored every
minute or less often; immediately while a user watches.
"""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from areal_tasks.engines.sampling import Sampler
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import StoreError
from areal_tasks.store.runs import Run
from areal_tasks.store.service_logs import LogCopy, LogName, local_logs
from areal_tasks.store.system import SystemLog

#: How long the end of a run waits for the last of such work.
CLOSE_SECONDS: Final = 60.0
HURRIED_SECONDS: Final = 2.0  # the same when the run is cancelled, or the store is away
#: Between two samples: at least, and per service, so that there are at most ten rows a second.
SAMPLE_SECONDS: Final = 5.0
SERVICE_SECONDS: Final = 0.1
#: Interval between two files of samples: at first and at most. It grows with SHARE of the time since the start, so that
#: a long run has few files.
FIRST_SECONDS: Final = 60.0
LONGEST_SECONDS: Final = 600.0
SHARE: Final = 0.05
#: How long samples are stored at once after a user has begun to watch.
WATCHED_SECONDS: Final = 60.0


class RepeatedWork:
    """Calls `repeat` every `seconds` in a thread of its own, and `end` after that. Use as a context.

    No error there ends a run: the first of several in a row is logged with what it delays (`what`), and then the work
    is tried again. What fails while the context is left is not logged, unless it is `end`.
    """

    seconds: ClassVar[float]
    what: ClassVar[str]
    close_seconds: ClassVar[float] = CLOSE_SECONDS

    def __init__(self, log: Any) -> None:
        self.log = log
        self._failing = False
        self._over = threading.Event()
        # With Prefect's settings of the flow, without which a line of its log would start another Prefect server.
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name=self.what, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        hurried = error is not None and (isinstance(error, StoreError) or not isinstance(error, Exception))
        self._over.set()
        self._thread.join(min(HURRIED_SECONDS, self.close_seconds) if hurried else self.close_seconds)

    def repeat(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """What is done last; by default once more the same."""
        self.repeat()

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self.seconds)
            try:
                self.end() if over else self.repeat()
            except Exception as error:
                if not self._failing and over == self._over.is_set():
                    self._failing = True
                    self.log.warning("%s are not up to date: %s; tried again", self.what, error)
            else:
                self._failing = False


class ServiceLogs(RepeatedWork):
    """Use as a context around the services of one start of the flow. `folder`: where the logs of all runs are."""

    seconds: ClassVar = 60.0
    what: ClassVar = "logs of services in the store"

    def __init__(self, run: Run, folder: Path, log: Any) -> None:
        super().__init__(log)
        self.run, self.folder = run, folder / run.name
        self._copies: dict[LogName, LogCopy] = {}

    def __enter__(self) -> ServiceLogs:
        for file in self._mine().values():  # of another run of this name: removed, or in another store
            file.replace(file.with_suffix(".old"))
        return super().__enter__()

    def repeat(self) -> None:
        for name, file in self._mine().items():
            self._copies.setdefault(name, LogCopy(self.run.store, self.run.name, name, file))()

    def _mine(self) -> dict[LogName, Path]:
        return {name: file for name, file in local_logs(self.folder).items() if name.owner == self.run.owner}


class ServiceSamples(RepeatedWork):
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
        """Poll the services; sample them, and store the samples, if that is due."""
        self.sampler.observe()
        now = time.monotonic()
        if now - self._sampled < max(SAMPLE_SECONDS, SERVICE_SECONDS * len(self.sampler.services)):
            return
        self._sampled = now
        self.stored.add(self.sampler.sample())
        if self.stored.newly_watched():
            self._watched = now
        pause = min(LONGEST_SECONDS, max(FIRST_SECONDS, SHARE * (now - self._began)))
        if now - self._watched < WATCHED_SECONDS or now - self._wrote >= pause:
            self._wrote = now
            self.stored.write()

    def end(self) -> None:
        self.stored.add(self.sampler.sample())
        self.stored.write()
