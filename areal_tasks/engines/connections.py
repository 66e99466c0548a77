"""HTTP to inference servers: each server's own connections, whole answers and streams, errors as `answers` has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import orjson

from areal_tasks.engines.answers import ServerDown, check_status, read_events, reason_of
from areal_tasks.engines.routing import Server

CLOSED: Final = "this client of the servers is closed"
CONNECT_SECONDS: Final = 10.0
#: How long an unused connection is kept. Less than uvicorn's 5 s, which SGLang keeps to: a request that is sent while
#: the server closes the connection fails, and is no reason to evict it.
IDLE_SECONDS: Final = 2.0


class Connections:
    """Use within one event loop; `close()` when done. `seconds`: how long a request or an order may take."""

    def __init__(self, token: str, seconds: float) -> None:
        self._seconds = seconds
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._sessions: dict[Server, aiohttp.ClientSession] = {}
        self.closed = False

    async def close(self) -> None:
        """Close all connections: whoever asks a server from here on is told ServerDown, too."""
        self.closed = True
        for session in self._sessions.values():
            await session.close()

    async def drop(self, server: Server) -> None:
        """Close all connections to a server: whoever waits for its answers is told ServerDown."""
        if server in self._sessions:
            await self._sessions.pop(server).close()

    async def answers(self, server: Server, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        """What `/generate` answers to `body`: once, or for a stream as often as it grows. Raises as `ask` does."""
        if not body.get("stream"):
            yield await self.ask(server, "POST", "/generate", body)
            return
        async with self._response(server, "POST", "/generate", body) as response:
            async for answer in read_events(str(response.url), response.content):
                yield [answer]

    async def ask(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> Any:
        """One HTTP exchange, a look if it has `seconds` of its own. Raises ServerDown, Refused or Interrupted."""
        async with self._response(server, method, path, body, seconds) as response:
            content = await response.read()
        return orjson.loads(content) if content else None  # SGLang answers some orders with nothing

    @asynccontextmanager
    async def _response(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None, seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, unless its status is an error: see `check_status`."""
        where, data = server.url + path, None if body is None else orjson.dumps(body)
        timeout = self._timeout(seconds, streamed=bool(body and body.get("stream")))
        waited_for = int(seconds is None)  # a look is not
        server.asks += waited_for
        try:
            async with self._session(server).request(method, where, data=data, timeout=timeout) as response:
                if response.status >= 400:
                    check_status(where, response.status, reason_of(await response.read()))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerDown(f"{where}: {str(error) or self._silent(seconds)}") from error
        finally:
            server.asks -= waited_for

    def _silent(self, seconds: float | None) -> str:
        """What a timeout says that says nothing itself."""
        setting = "" if seconds else ", which is inference.request_timeout_seconds"
        return f"no answer within {seconds or self._seconds:g} s{setting}"

    def _timeout(self, seconds: float | None, streamed: bool) -> aiohttp.ClientTimeout:
        """How long an exchange may take; a stream lasts as long as it likes, but may not be silent for so long."""
        most = seconds or self._seconds
        if streamed:
            return aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=most)
        return aiohttp.ClientTimeout(most, sock_connect=CONNECT_SECONDS)

    def _session(self, server: Server) -> aiohttp.ClientSession:
        """Connections of their own for each server, so that they can be dropped together."""
        if self.closed:
            raise ServerDown(CLOSED)
        if server not in self._sessions:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._sessions[server] = aiohttp.ClientSession(headers=self.headers, connector=connector)
        return self._sessions[server]
