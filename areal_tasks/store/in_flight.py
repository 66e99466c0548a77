"""The store operations of this process that are in flight, for the watchdog and the trainer's health report."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """An operation that the store has not answered yet; `since` on the monotonic clock."""

    number: int
    what: str
    since: float

    def describe(self) -> str:
        """`read s3://bucket/run/x.json for 31 s`."""
        return f"{self.what} for {time.monotonic() - self.since:.0f} s"


class Ledger:
    """A list of the operations in flight, of all threads, and the number of those that ended. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ended = 0
        self._numbers = itertools.count()
        self._open: dict[int, Operation] = {}
        self._lock = threading.Lock()

    @contextmanager
    def entry(self, operation: str, where: str) -> Iterator[None]:
        """List `operation` on `where` as in flight during the block."""
        entry = Operation(next(self._numbers), f"{operation} {where}", self.clock())
        self._open[entry.number] = entry
        try:
            yield
        finally:
            del self._open[entry.number]
            with self._lock:
                self.ended += 1

    def in_flight(self) -> list[Operation]:
        """The operations that have not been answered, the oldest first."""
        with self._lock:
            return sorted(self._open.copy().values(), key=lambda entry: entry.since)


#: The ledger of this process.
LEDGER = Ledger()
