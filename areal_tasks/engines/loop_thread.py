"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

POLL_SECONDS: Final = 0.2
BRIEF_SECONDS: Final = 2.0  # to cancel work in progress: Prefect's worker kills a flow 7 s after asking it to end


class Call(Protocol):
    """Runs a coroutine in such a loop, and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


class LoopThread:
    """An event loop in a thread of its own, for connections that outlast one call."""

    def __init__(self, name: str = "inference-client") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` and return immediately. RuntimeError if the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise

    def run(
        self, work: Coroutine[Any, Any, T], seconds: float | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> T:
        """The result of `work`. Without `seconds`, the calling thread calls `meanwhile` repeatedly until then.

        Raises TimeoutError, RuntimeError if the loop ends first, and what `meanwhile` raises, which cancels the work.
        """
        future = self.submit(work)
        if seconds is not None:
            return future.result(seconds)
        try:
            while not wait([future], POLL_SECONDS).done and self.thread.is_alive():
                meanwhile()
        except BaseException:
            if self.thread.is_alive():  # else a task that is left cannot be cancelled
                future.cancel()
            raise
        if not wait([future], 0.0).done:
            raise RuntimeError(f"the event loop {self.thread.name!r} has ended")
        return future.result()

    def _run(self) -> None:
        """Run the loop until `stop`. asyncio leaves its loop when a task, such as a user's workflow, calls `sys.exit`:
        the caller that awaits the task gets SystemExit, and without a restart all other callers would never return."""
        while True:
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                break
        self.loop.close()

    def end(self) -> None:
        """End the thread once nothing blocks it, without waiting for it."""
        self.loop.call_soon_threadsafe(self.loop.call_soon, self.loop.stop)  # cancelled tasks run once more

    def stop(self) -> None:
        """End the thread, waiting at most 5 s for it."""
        self.end()
        self.thread.join(5)
