"""The interface of launchers, which start services and report whether they run, and the handle of a start in progress.

Services do not depend on launchers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec
from areal_tasks.launchers.cluster import ANY, Resources
from areal_tasks.launchers.usage import Usage
from areal_tasks.store.parallel import in_background
from schemas.errors import UserError

log = logging.getLogger(__name__)

#: Seconds that stopping a service waits for its start to return.
LONGEST_START: Final = 30.0


@dataclass(frozen=True)
class Job:
    """One service to start. `threads`: 0 is all cores. `resources`: for launchers that find a machine for it."""

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

    def waiting(self) -> str:
        """Why no machine runs it yet; empty once one does."""
        return ""

    def usage(self) -> Usage | None:
        """The service's use of its machine, measured now or a few seconds ago; None if no machine runs it."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End the service and everything it started; returns when they have ended."""


class Launcher(Protocol):
    """Starts services, which end with the launcher, however it ends."""

    @property
    def authority(self) -> str:
        """See `Access.authority`; empty if services speak plain HTTP."""
        return ""

    def start(self, job: Job) -> Handle:
        """Start a service. Several threads may call this at once.

        UserError if no machine can run it now, or ever; OSError if it could not be started.
        """

    def close(self) -> None:
        """End what this process alone does for the services; threads end with it."""


class Starting:
    """The handle of a service that is started in the background: a cluster may take long to accept it.

    The service counts as ended if the start fails, or does not return although the service is to be stopped. If there
    is no machine for it now, that is with UNAVAILABLE.
    """

    def __init__(self, start: Callable[[], Handle], name: str) -> None:
        self.name = name
        self.why = ""  # the start has failed
        self._begun = in_background(start, f"start-{name}")
        self._code: int | None = None

    def started(self) -> Handle:
        """The handle that replaces this one; itself while the start is in progress, and if it has failed."""
        if self._begun.done() and self._code is None:
            try:
                return self._begun.result()
            except UserError as error:
                self._code, self.why = UNAVAILABLE, str(error)
            except OSError as error:
                self._code, self.why = os.EX_OSERR, f"it could not be started: {error}\n"
            log.warning("service %s could not be started: %s", self.name, self.why.strip())
        return self

    def exit_code(self) -> int | None:
        return self._code

    def waiting(self) -> str:
        return "its start is under way" if self._code is None else ""

    def usage(self) -> None:
        """None: no machine runs it yet."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop it once it has started; after LONGEST_START, do so in the background when its start returns."""
        wait([self._begun], LONGEST_START)
        if self._begun.done():
            _stop(grace_seconds, self._begun)
            return
        log.error("service %s: its start has not returned for %g s; going on without", self.name, LONGEST_START)
        self._code = UNAVAILABLE
        self._begun.add_done_callback(partial(_stop, grace_seconds))


def _stop(grace_seconds: float, begun: Future[Handle]) -> None:
    if begun.exception() is None:
        begun.result().stop(grace_seconds)
