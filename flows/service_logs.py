"""Copies the logs of a run's services into the store while they grow, so that a crash loses their last minute only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from areal_tasks.store.runs import Run
from areal_tasks.store.service_logs import LogCopy, LogName, local_logs
from flows.background import Background


class ServiceLogs(Background):
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
        """Copy what is new."""
        for name, file in self._mine().items():
            self._copies.setdefault(name, LogCopy(self.run.store, self.run.name, name, file))()

    def _mine(self) -> dict[LogName, Path]:
        return {name: file for name, file in local_logs(self.folder).items() if name.owner == self.run.owner}
