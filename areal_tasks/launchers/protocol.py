"""The interface of launchers, which start services and report whether they run. Services do not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.cluster import ANY, Resources
from areal_tasks.launchers.usage import Usage


@dataclass(frozen=True)
class Job:
    """One service to start: its module, specification, token, log file and number of threads (0: all cores).

    `resources`: what it needs, for launchers that find a machine for it.
    """

    module: str
    spec: ServiceSpec
    token: str
    log: Path
    threads: int = 0
    resources: Resources = ANY


class Handle(Protocol):
    """A started service."""

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs, or waits for a machine."""
        ...

    def waiting(self) -> str:
        """Why no machine runs it yet; empty once one does."""
        ...

    def usage(self) -> Usage | None:
        """The service's use of its machine, measured now or a few seconds ago; None if no machine runs it."""
        ...

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End the service and everything it started; returns when they have ended."""
        ...


class Launcher(Protocol):
    """Starts services, which end with the launcher, however it ends."""

    @property
    def authority(self) -> str:
        """See `Access.authority`; empty if services speak plain HTTP."""
        ...

    def start(self, job: Job) -> Handle:
        """Start a service. Several threads may call this at once.

        Raises:
            UserError: no machine can run it now, or ever.
            OSError: it could not be started.
        """
        ...

    def close(self) -> None: ...
