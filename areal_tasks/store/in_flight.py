"""The store operations of this process that are in flight, for the watchdog and the trainer's health report."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from areal_tasks.store.parallel import in_background

log = logging.getLogger(__name__)

LAST_SECONDS: Final = 10.0  # for a line of this process's log, and for the last ones


@dataclass(frozen=True)
class Operation:
    """An operation that the store has not answered yet; `since` on the monotonic clock."""

    number: int
    what: str
    since: float

    def describe(self) -> str:
        """`read s3://bucket/run/x.json for 31 s`."""
        return f"{self.what} for {time.monotonic() - self.since:.0f} s"


def patiently(work: Callable[[], object], what: str) -> None:
    """Wait for `work` in a thread, but not for long: the log may be on the disk that hangs."""
    futures.wait([in_background(work, what)], LAST_SECONDS)


def _end_process(status: int) -> None:
    patiently(logging.shutdown, "last lines")  # handlers may still hold them, as Prefect's do
    let_go()
    os._exit(status)


def let_go() -> None:
    """Close all pipes and sockets, by which services and verifiers notice the end of this process.

    The kernel would close them, but only once the thread that waits for the disk has ended, too.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith(("pipe:", "socket:")):
                os.close(int(name))


class Ledger:
    """A list of the operations in flight, of all threads, and the number of those that ended. `clock` gives seconds.

    `end_process(status)` ends this process at once.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, end_process: Callable[[int], object] = _end_process
    ) -> None:
        self.clock = clock
        self.end_process = end_process
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

    def end_if_hangs(self, seconds: float, status: int) -> None:
        """End this process with `status` if an operation has lasted so long: on a disk that hangs, nothing else can."""
        for oldest in self.in_flight()[:1]:
            if self.clock() - oldest.since >= seconds:
                why = f"no answer to {oldest.what} in launcher.store_seconds = {seconds:g}"
                text = f"the store hangs: {why}; this process ends. If nothing restarts it, resume the run."
                patiently(partial(log.critical, "%s", text), "last words")
                self.end_process(status)


#: The ledger of this process.
LEDGER = Ledger()
