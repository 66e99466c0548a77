"""Servers that lend the memory of their cache to the trainer or pause, and how to look at one that may not generate.

SGLang keeps no guard: what it generates while that memory is away ends it, and so does an order to give or to take
memory that it has given or taken already, or to give it while it generates. It generates a token to show its health,
for `/health` as for `/health_generate`. So whoever looks at a server does it here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from areal_tasks.engines.answers import Refused, ServerDown
from areal_tasks.engines.routing import Server
from areal_tasks.engines.watchdog import Sign

LOOK_SECONDS: Final = 5.0  # what needs no token is answered between two steps
HEALTH_SECONDS: Final = 30.0  # SGLang itself says 503 after 20 s without a token
CACHE: Final = {"tags": ["kv_cache"]}

Ask = Callable[..., Awaitable[Any]]  # as Connections.ask


class Lending:
    """What servers are to do with the memory of their cache (`wanted`: to lend it), and what each has done.

    `paused`: none is to generate, and silence is no sign of illness.
    """

    def __init__(self, ask: Ask) -> None:
        self.wanted = False
        self.paused = False
        self._ask = ask
        self._orders: defaultdict[Server, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._looks: defaultdict[Server, set[asyncio.Future[Any]]] = defaultdict(set)  # that may generate

    async def settle(self, server: Server) -> None:
        """Have the server give or take its memory as is wanted, and go on generating, if it has not yet."""
        async with self._orders[server]:
            if self.wanted and not server.lends:
                await self._give(server)
            elif server.lends and not self.wanted:
                await self._ask(server, "POST", "/resume_memory_occupation", CACHE)
                server.lends = False
            if not self.paused:
                await self.go_on(server)

    def settled(self, server: Server) -> bool:
        """Whether `settle` has nothing to do."""
        return server.lends == self.wanted and (self.paused or not server.paused)

    async def pause(self, server: Server, mode: str) -> None:
        """Have the server stop generating until `go_on`."""
        server.paused = True  # also if its answer is lost
        await self._ask(server, "POST", "/pause_generation", {"mode": mode})

    async def go_on(self, server: Server) -> None:
        """Have the server generate again, if it was paused."""
        if server.paused:
            await self._ask(server, "POST", "/continue_generation", {})
            server.paused = False

    @asynccontextmanager
    async def held(self, server: Server) -> AsyncIterator[None]:
        """Inside, the server's requests stand still and keep their cache."""
        async with self._orders[server]:
            await self.pause(server, "in_place")
            try:
                yield
            finally:
                if not self.paused:
                    await self.go_on(server)

    async def _give(self, server: Server) -> None:
        """Whatever comes of it, nothing is generated from here on; what is being generated for a look ends first."""
        server.lends = True
        while looks := self._looks[server]:
            await asyncio.wait(looks)
        await self._ask(server, "POST", "/release_memory_occupation", CACHE)

    async def look(self, server: Server) -> Any:
        """Have the server show that it is well: by a token, or where it may not generate by an answer.

        Raises what `ask` raises.
        """
        if self.paused or server.lends:
            return await self.answers(server)
        look = asyncio.ensure_future(self._ask(server, "GET", "/health_generate", seconds=HEALTH_SECONDS))
        self._looks[server].add(look)
        look.add_done_callback(self._looks[server].discard)
        return await look

    async def answers(self, server: Server) -> dict[str, Any]:
        """What the server says of itself, without generating. SGLang's scheduler answers, so that it cannot hang."""
        found: dict[str, Any] = await self._ask(server, "GET", "/server_info", seconds=LOOK_SECONDS)
        return found

    async def sign(self, server: Server) -> Sign:
        """How it gets on with its work, for a watchdog."""
        work = f"{server.requests} requests under way" if server.requests else "an order under way"
        try:
            return Sign(await self._progress(server), work)
        except (ServerDown, Refused) as error:
            return Sign(None, f"{work}; {error}")

    async def _progress(self, server: Server) -> object:
        """Something new whenever the server has got on: its count of steps, or that it generates, or that it answers.

        Nobody can tell how far an order is: while SGLang's scheduler is at one, it does not answer.
        """
        info = await self.answers(server)
        if self.paused or not server.requests:
            return object()
        if "steps" in info:
            return info["steps"]
        await self.look(server)
        return object()
