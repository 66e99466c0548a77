"""Handles of services that do not run: of one whose start is under way, and of one that could not be started."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from areal_tasks.engines.service import AWAY
from areal_tasks.launchers.protocol import Handle
from areal_tasks.store.parallel import in_background

log = logging.getLogger(__name__)

#: How long the end of a service waits for the return of its start.
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
        """It takes nothing."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """There is nothing to end."""


class Starting:
    """The handle of a service that is started in the background: a cluster may take long to accept it."""

    def __init__(self, start: Callable[[], Handle], name: str, patience: float = LONGEST_START) -> None:
        self.name = name
        self.patience = patience
        self._begun = in_background(start, f"start-{name}")
        self._left = False  # it was to be stopped, and its start does not return

    def started(self) -> Handle:
        """What replaces this handle: itself while the start is under way. Raises what the start has raised."""
        return self._begun.result() if self._begun.done() else self

    def exit_code(self) -> int | None:
        """None: it has not ended. AWAY once it was to be stopped, and its start does not return: its cluster is."""
        return AWAY if self._left else None

    def waiting(self) -> str:
        return "its start is under way"

    def usage(self) -> None:
        """No machine runs it yet."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Once it has started, if that takes no longer than `patience`; else when its start returns."""
        wait([self._begun], self.patience)
        if self._begun.done():
            self._begun.result().stop(grace_seconds)
            return
        log.error("service %s: its start has not returned for %g s; no longer waiting for it", self.name, self.patience)
        self._left = True
        self._begun.add_done_callback(_stop)


def _stop(begun: Future[Handle]) -> None:
    """End a service whose start has returned too late; an error is logged by the future."""
    begun.result().stop()
