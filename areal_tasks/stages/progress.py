"""Logs the progress of stages that take longer than `EVERY_SECONDS`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: Between two log lines. A stage that ends before the first logs none.
EVERY_SECONDS: Final = 30.0

log = logging.getLogger(__name__)


@contextmanager
def reported(label: str, unit: str, count: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """While inside, log every `EVERY_SECONDS` how many `unit` of `label` are done.

    `count` gives (done, total) and is called in a thread of its own. A total of 0 means unknown: nothing is logged.
    """
    ended, every, started = threading.Event(), EVERY_SECONDS, time.monotonic()

    def report() -> None:
        while not ended.wait(every):
            done, of = count()
            if of:
                log.info("%s", progress_line(label, unit, done, of, time.monotonic() - started))

    reporter = threading.Thread(target=report, name=f"progress of {label}", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join(1.0)  # not for ever: `count` may wait for an engine that has ended


def progress_line(label: str, unit: str, done: int, of: int, seconds: float) -> str:
    """`rollout 3: 96 of 512 samples (19%) after 30 s, 3.2 per second, about 130 s left`."""
    line = f"{label}: {done:,} of {of:,} {unit} ({done / of:.0%}) after {seconds:.0f} s"
    if not done:
        return line
    return f"{line}, {done / seconds:.3g} per second, about {(of - done) * seconds / done:.0f} s left"
