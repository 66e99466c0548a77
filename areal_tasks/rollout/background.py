"""Work of an event loop that is not waited for, and what is put into the store later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from areal_tasks.store.backend import StoreError
from areal_tasks.store.spool import StartClosed

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # until the store is tried again


class Background:
    """Tasks of one event loop, which itself keeps none alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Do this without being waited for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def store(
        self,
        seconds: float,
        needed: Callable[[], bool],
        put: Callable[[], Awaitable[None]],
        failed: Callable[[Exception], None],
    ) -> None:
        """After so many seconds, put into the store what is still needed there; again later while the store fails.

        `failed` is told any other error, and that the start of the spool was closed.
        """

        async def attempt() -> None:
            try:
                if needed():
                    await put()
            except StartClosed as error:
                failed(error)
            except StoreError as error:
                log.warning("groups are not in the store yet: %s", error)
                self.store(RETRY_SECONDS, needed, put, failed)
            except Exception as error:
                log.exception("groups cannot be written to the store")
                failed(error)

        asyncio.get_running_loop().call_later(seconds, lambda: self.do(attempt()))
