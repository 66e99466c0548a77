"""Handles of services that do not run: one whose start is in progress, and one that could not be started."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from areal_tasks.engines.service import UNAVAILABLE
from areal_tasks.launchers.protocol import Handle
from areal_tasks.store.parallel import in_background

log = logging.getLogger(__name__)

#: Seconds that stopping a service waits for its start to return.
LONGEST_START: Final = 30.0


class NotStarted:
    """The handle of a service that could not be started. `why`: the reason, for its failure's message."""

    def __init__(self, code: int, why: str) -> None:
        self.code = code
        self.why = why

    def exit_code(self) -> int:
        return self.code

    def waiting(self) -> str:
        return ""

    def usage(self) -> None:
        """None: no process runs."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Nothing to do: no process runs."""


class Starting:
    """The handle of a service that is started in the background: a cluster may take long to accept it."""

    def __init__(self, start: Callable[[], Handle], name: str) -> None:
        self.name = name
        self._begun = in_background(start, f"start-{name}")
        self._abandoned = False  # it was to be stopped, and its start did not return

    def started(self) -> Handle:
        """The handle that replaces this one; itself while the start is in progress. Raises what the start raised."""
        return self._begun.result() if self._begun.done() else self

    def exit_code(self) -> int | None:
        """None; UNAVAILABLE once it was to be stopped and its start did not return: the cluster does not answer."""
        return UNAVAILABLE if self._abandoned else None

    def waiting(self) -> str:
        return "its start is under way"

    def usage(self) -> None:
        """None: no machine runs it yet."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop it once it has started; after LONGEST_START, do so in the background when its start returns."""
        wait([self._begun], LONGEST_START)
        if self._begun.done():
            self._begun.result().stop(grace_seconds)
            return
        log.error("service %s: its start has not returned for %g s; no longer waiting for it", self.name, LONGEST_START)
        self._abandoned = True
        self._begun.add_done_callback(_stop)


def _stop(begun: Future[Handle]) -> None:
    """Stop a service whose start has returned too late; the future logs an error."""
    begun.result().stop()
