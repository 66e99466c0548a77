"""Fencing: who may command the trainer, and that a retried command does not act twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.errors import UserError

T = TypeVar("T")


class StaleCommand(Exception):
    """The command is out of order: it expects another version than is held. HTTP 409."""


class Superseded(StaleCommand):
    """The command comes from an owner after whom another one has begun: HTTP 403."""


class Declined(UserError):
    """A change was not made for what its input is: the memory is as it was, and a repeat is declined again."""


class Fence(Generic[T]):
    """Remembers the highest owner seen, the version held and the last change made to it.

    Changes are made from the service's one command thread, so a repeat that arrives while the first is still at work
    waits for it and then recalls its result. Owners may be admitted from any thread.
    """

    def __init__(self) -> None:
        self.owner = 0
        self.version: int | None = None
        self._last: tuple[int, str, T] | None = None
        self._lock = threading.Lock()

    def admit(self, owner: int) -> None:
        """Let `owner` in, for good: lower owners are refused from now on.

        Raises:
            Superseded: a higher owner has been here.
        """
        with self._lock:
            if owner < self.owner:
                raise Superseded(
                    f"owner {owner} was superseded by owner {self.owner}: a later start of this run commands"
                )
            self.owner = owner

    def expect(self, version: int) -> None:
        """Check that the trainer holds `version`.

        Raises:
            StaleCommand: it holds another one, or none.
        """
        if self.version is None:
            raise StaleCommand(f"version {version} was expected, but nothing is loaded: send /load first")
        if version != self.version:
            raise StaleCommand(f"version {version} was expected, but version {self.version} is held")

    def restart(self, version: int | None) -> None:
        """The memory was replaced (or, with None, given up): forget what was done to the old one."""
        self.version, self._last = version, None

    def recall(self, version: int, digest: str) -> T | None:
        """The result of the last change, if that was this one."""
        return self._last[2] if self._last is not None and self._last[:2] == (version, digest) else None

    def change(self, version: int, digest: str, action: Callable[[], T]) -> T:
        """Do `action`, which turns `version` into its successor, and remember its result.

        Where it fails, the memory is neither version: nothing is held until the next load. Unless it was declined.

        Raises:
            StaleCommand: another version is held.
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
