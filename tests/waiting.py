"""Tests wait only by these functions: for a condition, with a limit that no working machine reaches."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import psutil

T = TypeVar("T")

#: Seconds. Nothing that a test waits for takes a tenth of it on an idle machine.
LIMIT: Final = 200.0
PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5


def wait_until(condition: Callable[[], T], what: object = "the condition", limit: float = LIMIT) -> T:
    """The first true value of `condition`. AssertionError after `limit` seconds."""
    end = (began := time.monotonic()) + limit
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(pause_after(began))
        began = time.monotonic()
    return found


def pause_after(began: float) -> float:
    """The pause after a look that began at this time: asking a server or all processes must not take all of a core."""
    return min(max(PAUSE, 5 * (time.monotonic() - began)), LONGEST_PAUSE)


@contextmanager
def held_back(owner: Any, name: str) -> Iterator[threading.Event]:
    """While inside, calls of this function of a class or module wait for the event. It is set at the end, too."""
    go_on, function = threading.Event(), getattr(owner, name)

    def wait_and_call(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(LIMIT)
        return function(*arguments, **options)

    with patch.object(owner, name, wait_and_call):
        try:
            yield go_on
        finally:
            go_on.set()


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this id, runs. False for a zombie, and if it ends during the check."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rendezvous(folder: Path, name: str, parties: int = 2) -> None:
    """Return when so many processes have called it, in all of them at nearly the same instant."""
    place, end = folder / name, time.monotonic() + LIMIT
    place.mkdir(parents=True, exist_ok=True)
    (place / str(os.getpid())).touch()
    while len(os.listdir(place)) < parties:
        assert time.monotonic() < end, f"{name}: the others did not come"
        os.sched_yield()


async def until(condition: Callable[[], object], what: object = "the condition", limit: float = LIMIT) -> None:
    """As `wait_until`, without blocking the event loop."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        await asyncio.sleep(PAUSE / 4)
