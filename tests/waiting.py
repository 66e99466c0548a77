"""The one way in which tests wait: for a condition, with a limit that only a machine without hope reaches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import psutil

T = TypeVar("T")

#: Seconds. Nothing that a test waits for takes a tenth of it on an idle machine.
LIMIT: Final = 200.0
PAUSE: Final = 0.02


def wait_until(condition: Callable[[], T], what: object = "the condition", limit: float = LIMIT) -> T:
    """The first true value of `condition`. AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(PAUSE)
    return found


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or one of that number, runs: not once it has ended, even if nobody has asked for its exit
    status, or while we look."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def meet(folder: Path, name: str, parties: int = 2) -> None:
    """Return when so many processes have called it, in all of them at nearly the same instant."""
    place, end = folder / name, time.monotonic() + LIMIT
    place.mkdir(parents=True, exist_ok=True)
    (place / str(os.getpid())).touch()
    while len(os.listdir(place)) < parties:
        assert time.monotonic() < end, f"{name}: the others did not come"
        os.sched_yield()


async def until(condition: Callable[[], object], what: object = "the condition", limit: float = LIMIT) -> None:
    """The same in an event loop, which goes on meanwhile."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        await asyncio.sleep(PAUSE / 4)
