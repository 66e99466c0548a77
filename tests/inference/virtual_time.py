"""An event loop whose time passes only while nothing can be done: whatever waits for a delay, waits for none.

So what happens in it, and in which order, does not depend on the machine. For clients and servers of one loop: what
another thread or process does takes no time here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final

from waiting import LIMIT

#: Real seconds within which the kernel has handed over what one end of a connection has sent to the other.
SETTLED: Final = 0.001


class _Selector(selectors.DefaultSelector):
    """Where nothing is ready, the time that was to be waited for has passed."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(SETTLED)
        if not ready:
            self.passed += timeout
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """Its clock stands still while anything is ready."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(asyncio.wait_for(test(), LIMIT))
