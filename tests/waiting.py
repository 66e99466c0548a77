"""The one way in which tests wait: for a condition, with a limit that only a machine without hope reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

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


async def until(condition: Callable[[], object], what: object = "the condition", limit: float = LIMIT) -> None:
    """The same in an event loop, which goes on meanwhile."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        await asyncio.sleep(PAUSE / 4)
