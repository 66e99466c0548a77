"""Inference servers that compute only a part of the time, as if their model were larger."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from areal_tasks.launchers.local import LocalHandle, LocalLauncher
from areal_tasks.launchers.protocol import Job

PERIOD_SECONDS: Final = 0.1


@contextmanager
def slowed(share: float, begun: Callable[[], bool]) -> Iterator[None]:
    """While inside, servers that start are stopped for all but this share of each period; 1 does not stop them.

    Before `begun` they are not stopped, so that they start as fast as they can.
    """
    start, over = LocalLauncher.start, threading.Event()

    def start_slowed(self: LocalLauncher, job: Job) -> LocalHandle:
        handle = start(self, job)
        if job.spec.name != "trainer":
            threading.Thread(target=_stop_and_go, args=(handle.process, share, begun, over), daemon=True).start()
        return handle

    if share < 1:
        LocalLauncher.start = start_slowed  # type: ignore[method-assign]
    try:
        yield
    finally:
        over.set()
        LocalLauncher.start = start  # type: ignore[method-assign]


def _stop_and_go(
    process: subprocess.Popen[bytes], share: float, begun: Callable[[], bool], over: threading.Event
) -> None:
    while not begun() and not over.wait(PERIOD_SECONDS):
        pass
    while process.poll() is None and not over.is_set():
        process.send_signal(signal.SIGSTOP)
        over.wait(PERIOD_SECONDS * (1 - share))
        process.send_signal(signal.SIGCONT)
        over.wait(PERIOD_SECONDS * share)
