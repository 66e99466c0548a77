"""Fencing: only the newest start of the flow (owner) commands the trainer, and a retry takes effect only once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.errors import UserError

T = TypeVar("T")


class StaleCommand(Exception):
    """The command expects another version than the trainer holds: HTTP 409."""


class Superseded(StaleCommand):
    """The command comes from an owner that a later one has superseded: HTTP 403."""


class Declined(UserError):
    """A change was refused because of its input: the state is unchanged, and a retry is refused again."""


class Fence(Generic[T]):
    """Holds the highest owner seen, the version held and the last change. Owners may be admitted from any thread.

    Changes are made from the service's single command thread: a retry waits for the original and recalls its result.
    """

    def __init__(self) -> None:
        self.owner = 0
        self.version: int | None = None
        self._last: tuple[int, str, T] | None = None
        self._lock = threading.Lock()

    def admit(self, owner: int) -> None:
        """Accept `owner`; lower ones are refused from now on, as Superseded."""
        with self._lock:
            if owner < self.owner:
                raise Superseded(f"start #{owner} of this run was superseded by start #{self.owner}")
            self.owner = owner

    def expect(self, version: int) -> None:
        """StaleCommand if the trainer holds another version than `version`, or none."""
        if self.version is None:
            raise StaleCommand(f"version {version} was expected, but nothing is loaded: send /load first")
        if version != self.version:
            raise StaleCommand(f"version {version} was expected, but version {self.version} is held")

    def restart(self, version: int | None) -> None:
        """Record that the state was replaced by `version` (None: it was discarded), and forget the last change."""
        self.version, self._last = version, None

    def recall(self, version: int, digest: str) -> T | None:
        """The result of the last change, if it had this version and digest."""
        return self._last[2] if self._last is not None and self._last[:2] == (version, digest) else None

    def change(self, version: int, digest: str, action: Callable[[], T]) -> T:
        """Run `action`, which turns `version` into its successor, and remember its result.

        StaleCommand: another version is held. If the action raises `Declined`, `version` is still held. After another
        error the state is undefined, and no version is held until the next load.
        """
        self.expect(version)
        last = self._last
        self.restart(None)
        try:
            result = action()
        except Declined:
            self.version, self._last = version, last
            raise
        self.version, self._last = version + 1, (version, digest, result)
        return result
