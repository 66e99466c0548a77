"""Copies the logs of a run's services into the store while they grow, so that a crash loses their last minute only."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from areal_tasks.store.backend import StoreError
from areal_tasks.store.runs import Run
from areal_tasks.store.service_logs import LogCopy, LogName, local_logs
from flows.artifacts import CLOSE_SECONDS, HURRIED_SECONDS

COPY_SECONDS: Final = 60.0


class ServiceLogs:
    """Use as a context around the services of one start of the flow.

    Args:
        folder: where the logs of the services of all runs are.
        log: where it is logged that the store is away.
    """

    def __init__(self, run: Run, folder: Path, log: Any) -> None:
        self.run, self.folder, self.log = run, folder / run.name, log
        self._copies: dict[LogName, LogCopy] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="service logs", daemon=True)

    def __enter__(self) -> ServiceLogs:
        for file in self._mine().values():  # of another run of this name: removed, or in another store
            file.replace(file.with_suffix(".old"))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurried = error is not None and (isinstance(error, StoreError) or not isinstance(error, Exception))
        self._over.set()
        self._thread.join(HURRIED_SECONDS if hurried else CLOSE_SECONDS)

    def _work(self) -> None:
        while not self._over.wait(COPY_SECONDS):
            self.copy()
        self.copy()

    def copy(self) -> None:
        """Copy what is new. What fails is tried again the next time."""
        try:
            for name, file in self._mine().items():
                copy = self._copies.setdefault(name, LogCopy(self.run.store, self.run.name, name, file))
                copy()
        except (StoreError, OSError) as error:
            self.log.warning("logs of services are not in the store yet: %s", error)

    def _mine(self) -> dict[LogName, Path]:
        return {name: file for name, file in local_logs(self.folder).items() if name.owner == self.run.owner}
