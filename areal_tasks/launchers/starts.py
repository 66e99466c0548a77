"""Handles of services that do not run: of one whose start is under way, and of one that could not be started."""

from __future__ import annotations

from collections.abc import Callable

from areal_tasks.launchers.protocol import Handle
from areal_tasks.store.parallel import in_background


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

    def __init__(self, start: Callable[[], Handle], name: str) -> None:
        self._begun = in_background(start, f"start-{name}")

    def started(self) -> Handle:
        """What replaces this handle: itself while the start is under way. Raises what the start has raised."""
        return self._begun.result() if self._begun.done() else self

    def exit_code(self) -> None:
        """It has not ended."""

    def waiting(self) -> str:
        return "its start is under way"

    def usage(self) -> None:
        """No machine runs it yet."""

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Once it has started."""
        self._begun.result().stop(grace_seconds)
