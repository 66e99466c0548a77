"""The flow's side of one rollout worker: orders go there, in order, and what it tells comes back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final, Protocol

import aiohttp
from pydantic import BaseModel

from areal_tasks.engines.sharing import Serving
from areal_tasks.rollout.orders import STATUSES, Begin, Event, Lease, LeaseOver, News, Orders, Part, Written
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 0.2  # until a worker is asked again that does not answer: its process may have ended


class WorkerLost(Exception):
    """The worker does not answer any more."""


class Listener(Protocol):
    """Who gives a worker its orders."""

    def order(self) -> Begin:
        """What a worker is told first."""
        ...

    def begun(self, link: Link) -> None:
        """It generates from now on."""
        ...

    def heard(self, link: Link, event: Event) -> None:
        """Something has happened there."""
        ...

    def lost(self, link: Link) -> None:
        """All that it was given, and did not leave in the store, is lost."""
        ...

    def failed(self, link: Link, error: Exception) -> None:
        """It cannot do what it is told."""
        ...


class Link:
    """One start of a worker's process. Use within one event loop; `close()` when done."""

    def __init__(self, url: str, token: str, listener: Listener) -> None:
        self.url = url
        self.ready = False  # it may be given groups
        self.tried = False  # it was ready once, or has failed to be
        self.busy: dict[str, int] = {}  # its requests under way, by the server's address, when it was last looked at
        self.start: int | None = None  # of the spool, once it has recorded something
        self._listener = listener
        self._told: Serving | None = None
        self._telling = asyncio.Lock()
        self._begin: list[Lease] = []
        self._forget: list[int] = []
        self._ordered = asyncio.Event()
        timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_SECONDS)  # the watchdog ends what hangs
        self._session = aiohttp.ClientSession(
            url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        self._life = asyncio.ensure_future(self._live())

    def give(self, leases: list[Lease]) -> None:
        """Have it generate these groups."""
        self._begin += leases
        self._ordered.set()

    def take_back(self, numbers: list[int]) -> None:
        """These leases are over."""
        self._forget += numbers
        self._ordered.set()

    async def tell(self, serving: Serving) -> None:
        """Return when it knows which servers may generate, or is lost."""
        async with self._telling:
            if self.ready and serving != self._told:
                with suppress(WorkerLost, LeaseOver):
                    await self._ask("serving", serving)
                    self._told = serving

    async def requests(self) -> dict[str, int]:
        """Its requests under way, by the server's address."""
        with suppress(WorkerLost, LeaseOver):
            return dict(await self._ask("busy"))
        return {}

    async def look(self) -> object:
        """A sign that it is alive, which is new each time; none."""
        with suppress(WorkerLost, LeaseOver, TimeoutError):
            self.busy = dict(await asyncio.wait_for(self._ask("busy"), LOOK_SECONDS))
            return object()
        return None

    async def write(self, part: Part) -> Written:
        """Have it write a part of an iteration.

        Raises:
            WorkerLost: it has not, and the groups in its memory are lost.
            LeaseOver: one of these leases is over.
            StoreError: rows in the spool cannot be read, or the store does not take the part.
        """
        return Written.model_validate(await self._ask("write", part))

    async def flush(self) -> None:
        """Have it leave in the store what waits."""
        with suppress(WorkerLost, LeaseOver):
            await self._ask("flush")

    async def close(self) -> None:
        """Have it give up what is under way and leave in the store what waits; then let go of it."""
        self._life.cancel()
        if self.ready:
            with suppress(WorkerLost, LeaseOver, UserError):
                await self._ask("close")
        await self._session.close()

    async def drop(self) -> None:
        """Let go of a worker that has ended."""
        self._life.cancel()
        await self._session.close()

    async def _live(self) -> None:
        """Until the link is closed: tell it what to do, and hear what it says; from the beginning where it is lost."""
        while True:
            try:
                await self._serve()
            except (WorkerLost, LeaseOver, Unavailable) as error:
                log.debug("rollout worker at %s: %s", self.url, error)
            except Exception as error:
                self._listener.failed(self, error)
            self.ready, self.tried = False, True
            self._listener.lost(self)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _serve(self) -> None:
        order = self._listener.order()
        await self._ask("begin", order)
        self._told, self._begin, self._forget = order.serving, [], []
        self.ready = self.tried = True
        self._listener.begun(self)
        works = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._send())]
        try:
            await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()

    async def _listen(self) -> None:
        known = 0
        while True:
            news = News.model_validate(await self._ask(f"news?known={known}"))
            known += len(news.events)
            for event in news.events:
                self._listener.heard(self, event)

    async def _send(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            orders = Orders(begin=tuple(self._begin), forget=tuple(self._forget))
            self._begin, self._forget = [], []
            await self._ask("orders", orders)

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
