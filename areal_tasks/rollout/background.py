"""Background tasks of an event loop, and delayed writes to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from areal_tasks.store.backend import StoreError
from areal_tasks.store.spool import StartClosed

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # until a failed write to the store is retried


class Background:
    """Keeps the tasks of one event loop alive; the loop itself does not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` as a task that is not awaited."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def store(
        self,
        seconds: float,
        needed: Callable[[], bool],
        put: Callable[[], Awaitable[object]],
        failed: Callable[[Exception], None],
    ) -> None:
        """After `seconds`, await `put` if `needed()`; retry every `RETRY_SECONDS` while the store fails.

        `failed` is called with `StartClosed`, and with any error that is not the store's.
        """

        async def attempt() -> None:
            try:
                if needed():
                    await put()
            except StartClosed as error:
                failed(error)
            except StoreError as error:
                log.warning("groups are not in the store yet, retrying: %s", error)
                self.store(RETRY_SECONDS, needed, put, failed)
            except Exception as error:
                log.exception("groups cannot be written to the store")
                failed(error)

        asyncio.get_running_loop().call_later(seconds, lambda: self.do(attempt()))
