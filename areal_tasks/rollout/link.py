"""The flow's client of one rollout worker: sends it orders, in sequence, and receives its events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from pydantic import BaseModel

from areal_tasks.engines.access import Access
from areal_tasks.engines.sharing import Serving
from areal_tasks.rollout.orders import STATUSES, Begun, Busy, Known, Lease, LeaseOver, News, Orders, Part, Written
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError

if TYPE_CHECKING:
    from areal_tasks.rollout.rollouts import Rollouts

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 5.0  # for an answer to a heartbeat
RETRY_SECONDS: Final = 0.2  # until the first order is sent again to a worker that was lost or is not ready


class WorkerLost(Exception):
    """The worker no longer answers."""


class Link:
    """One start of a worker's process. Use within one event loop; `close()` when done.

    `flow` gives the worker its first order, and receives its events.
    """

    def __init__(self, url: str, access: Access, flow: Rollouts) -> None:
        self.url = url
        self.ready = False  # the worker may be given groups
        self.tried = False  # it has been ready, or has failed to become ready
        self.busy = Busy()  # at the last heartbeat
        self.leaving = False  # it gets no more groups, and ends when it has none
        self.retired = False  # the same, and it is stopped for good
        self.explained = False  # its end does not count as a failure: it was asked to end, or had groups in flight
        self.start: int | None = None  # the number of its start in the spool, once it has begun
        self._flow = flow
        self._serving: Serving | None = None  # as the worker last acknowledged it
        self._following = asyncio.Lock()
        self._begin: list[Lease] = []
        self._forget: list[int] = []
        self._has_orders = asyncio.Event()
        self._failed = asyncio.Event()  # a request outside the session has failed
        timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_SECONDS)  # the watchdog ends a worker that hangs
        self._session = aiohttp.ClientSession(
            url,
            headers=access.headers,
            timeout=timeout,
            connector=access.connector(),
        )
        self._session_task = asyncio.ensure_future(self._keep_session())

    def give(self, leases: list[Lease]) -> None:
        """Have the worker generate these groups."""
        self._begin += leases
        self._has_orders.set()

    def take_back(self, numbers: list[int]) -> None:
        """Tell the worker that these leases are over."""
        self._forget += numbers
        self._has_orders.set()

    async def follow(self, serving: Serving) -> None:
        """Return when the worker has acknowledged which servers may generate, or is lost."""
        async with self._following:
            if self.ready and serving != self._serving:
                with suppress(WorkerLost, LeaseOver):
                    await self._ask_or_end("serving", serving)
                    self._serving = serving

    async def requests(self) -> dict[str, int]:
        """The worker's requests in flight, by server address."""
        return (await self._busy() or Busy()).requests

    async def heartbeat(self) -> object:
        """A new object if the worker answers; None otherwise."""
        with suppress(TimeoutError):
            if (busy := await asyncio.wait_for(self._busy(), HEARTBEAT_SECONDS)) is not None:
                self.busy = busy
                return object()
        return None

    async def write(self, part: Part) -> Written:
        """Have the worker write a part of an iteration.

        Raises:
            WorkerLost: the part is not written, and the groups in the worker's memory are lost.
            LeaseOver: one of these leases is over.
            SpoolDamaged: rows in the spool cannot be read.
            StoreError: the store does not take the part.
        """
        return Written.model_validate(await self._ask_or_end("write", part))

    async def flush(self) -> None:
        """Have the worker write its finished groups to the store."""
        await self._tell("flush")

    async def leave(self) -> None:
        """Have the worker write each finished group to the store at once."""
        await self._tell("leave")

    async def close(self) -> None:
        """Have the worker abandon running groups and write finished ones to the store; then disconnect."""
        self._session_task.cancel()
        if self.ready:
            with suppress(UserError):
                await self._tell("close")
        await self._session.close()

    async def end(self) -> None:
        """Have the worker's process end."""
        self.ready, self.explained = False, True
        await self._tell("end")

    async def drop(self) -> None:
        """Disconnect from a worker that has ended."""
        self._session_task.cancel()
        await self._session.close()

    async def _keep_session(self) -> None:
        """Exchange orders and events until the link is closed; after a loss, send the first order again."""
        while True:
            try:
                await self._serve()
            except (WorkerLost, LeaseOver, Unavailable) as error:
                log.debug("rollout worker at %s: %s", self.url, error)
            except Exception as error:
                self._flow.end(error)
            self.ready, self.tried = False, True
            self._flow.lost(self)
            await asyncio.sleep(RETRY_SECONDS)

    async def _serve(self) -> None:
        order = self._flow.order()
        self.start = Begun.model_validate(await self._ask("begin", order)).start
        self._serving, self._begin, self._forget = order.serving, [], []
        self.ready = self.tried = True
        self._failed.clear()
        self._flow.begun(self)
        works = [asyncio.ensure_future(work) for work in (self._listen(), self._send(), self._end())]
        try:
            await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()

    async def _listen(self) -> None:
        known = 0
        while True:
            news = News.model_validate(await self._ask("news", Known(known=known)))
            known += len(news.events)
            for event in news.events:
                self._flow.received(self, event)

    async def _send(self) -> None:
        while True:
            await self._has_orders.wait()
            self._has_orders.clear()
            orders = Orders(begin=tuple(self._begin), forget=tuple(self._forget))
            self._begin, self._forget = [], []
            await self._ask("orders", orders)

    async def _end(self) -> None:
        """End the session when a request of `_ask_or_end` has failed."""
        await self._failed.wait()
        raise WorkerLost("another request has failed")

    async def _busy(self) -> Busy | None:
        found = await self._tell("busy")
        return None if found is None else Busy.model_validate(found)

    async def _tell(self, what: str) -> Any:
        """The worker's answer; None if it does not answer, or has no orders."""
        with suppress(WorkerLost, LeaseOver):
            return await self._ask(what)
        return None

    async def _ask_or_end(self, what: str, body: BaseModel) -> Any:
        """`_ask`; if the worker does not answer, the session ends, which might go on without what was asked."""
        try:
            return await self._ask(what, body)
        except WorkerLost:
            self._failed.set()
            raise

    async def _ask(self, what: str, body: BaseModel | None = None) -> Any:
        """One HTTP exchange. Raises WorkerLost, and the errors of `STATUSES`."""
        try:
            data = None if body is None else body.model_dump_json()
            async with self._session.post(f"/{what}", data=data) as response:
                found = await response.json(content_type=None)
                if response.status < 400:
                    return found
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session is closed
            raise WorkerLost(str(error) or type(error).__name__) from error
        kinds: dict[int, type[Exception]] = {status: kind for kind, status in STATUSES}
        raise kinds.get(response.status, RuntimeError)(found["error"])
