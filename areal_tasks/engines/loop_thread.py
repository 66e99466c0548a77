"""An event loop beside the other threads of a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

TURN_SECONDS: Final = 0.5


class LoopThread:
    """An event loop in a thread of its own, for connections that outlast one call."""

    def __init__(self, name: str = "inference-client") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`, and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(
        self,
        work: Coroutine[Any, Any, T],
        seconds: float | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> T:
        """What `work` returns. The calling thread does `meanwhile` again and again until then.

        Raises TimeoutError after `seconds`, and what `meanwhile` raises: then the work is cancelled.
        """
        future = self.submit(work)
        if seconds is not None:
            return future.result(seconds)
        try:
            while not wait([future], TURN_SECONDS).done:
                meanwhile()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _turn(self) -> None:
        """Until `stop`. asyncio leaves its loop when a task calls `sys.exit`, also one of somebody's own workflow:
        whoever waits for that task gets it, and all others would wait for ever."""
        while True:
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                break
        self.loop.close()

    def end(self) -> None:
        """Have the thread end once what blocks it is over; it is not waited for."""
        self.loop.call_soon_threadsafe(self.loop.call_soon, self.loop.stop)  # cancelled tasks have a last turn

    def stop(self) -> None:
        """End the thread."""
        self.end()
        self.thread.join(5)
