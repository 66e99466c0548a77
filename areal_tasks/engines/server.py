"""One inference server: what it has under way, requests and orders over SGLang's native API, what it says of itself.

SGLang (0.5.17) tells an error by the HTTP status, or by an event where a stream has begun already. It keeps no guard:
what it generates while the memory of its cache is lent to the trainer ends it, and so does an order to give or to take
memory that it has given or taken already, or to give it while it generates. It generates a token to show its health,
for `/health` as for `/health_generate`. So whoever looks at a server does it by `Server.probe`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp
import orjson

from areal_tasks.engines.watchdog import Heartbeat
from schemas.errors import UserError
from schemas.recipe.derived import Interruption

log = logging.getLogger(__name__)
T = TypeVar("T")
Busy = Callable[[], Awaitable[Mapping[str, int]]]  # requests of other clients under way, by the server's address

AFFINITIES: Final = 65536  # groups whose server is remembered, at most
POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 10.0
#: How long an unused connection is kept. Less than uvicorn's 5 s, which SGLang keeps to: a request that is sent while
#: the server closes the connection fails, and is no reason to evict it.
IDLE_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 25.0  # for an answer to a look: SGLang itself says 503 after 20 s without a token
CACHE: Final = {"tags": ["kv_cache"]}
INTERRUPTED: Final = 499  # SGLang's status for a request that was aborted before its model saw it


class ServerDown(Exception):
    """A server did not answer, or answered that it cannot serve. The request may be repeated elsewhere."""


class WrongVersion(ServerDown):
    """A server generated with, or holds, other weights than it was told to."""


class BadRequest(UserError):
    """A server refused a request as wrong (HTTP 4xx); the message holds its reason."""


class Interrupted(Exception):
    """The request was aborted before anything was generated."""


@dataclass(frozen=True)
class Target:
    """Weights that servers are to hold. `key` tells apart what has one version, such as two attempts at it.

    `uri` says where servers load them from; none: they can only be handed over by the trainer.
    """

    version: int
    key: str = ""
    uri: str | None = None


@dataclass(frozen=True)
class MakingWay:
    """What becomes of the requests under way on a server that takes new weights."""

    drains: bool  # the weights wait for their end
    pause: str | None  # they are stopped so before, and go on after
    flags: dict[str, bool]  # of the order to load


def making_way(mode: Interruption | None, continues: bool, handed: bool) -> MakingWay:
    """By the recipe's `mode`, none where nothing is under way.

    Weights that are `handed` over by the trainer need servers that stand still. The order to load others ends all
    requests by itself, or stops them while a server that `continues` computes their cache again, as the embedded does.
    """
    keeps = mode == "in_place"
    pause = "in_place" if keeps else "abort" if mode == "abort" and handed else None
    ends = not (keeps or (mode == "abort" and continues))
    return MakingWay(mode == "drain", pause, {"flush_cache": not keeps, "abort_all_requests": ends})


@dataclass(eq=False)
class Server:
    """One server as one client sees it, which may not be the only one. Use within one event loop; `close()` when done.

    `ask` and all that asks raise ServerDown or BadRequest.
    """

    url: str
    slots: int  # requests it may have under way
    start: int = 0  # tells processes at the same address apart
    healthy: bool = True
    current: bool = True  # it holds the weights that are wanted
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60.0  # that a request or an order may take
    version: int | None = None  # the newest weights it is known to hold
    elsewhere: int = 0  # requests of other clients, as last heard
    failing_since: float | None = None  # the first failure since it last answered, by the pool's clock
    failures: int = 0  # since then
    admitted: float = 0.0  # when it was let in
    requests: int = 0  # under way, of this client
    asks: int = 0  # requests and orders that it has not answered
    paused: bool = False  # it was told to stop generating, or may have been, and not yet to go on
    lends: bool = False  # the memory of its cache, to the trainer: it must not generate
    load: int = 0  # samples under way
    done: int = 0  # samples answered
    orders: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time
    _tokens: set[asyncio.Future[Any]] = field(default_factory=set)  # that are generated to show its health
    _session: aiohttp.ClientSession | None = None  # connections of its own, so that they can be dropped together
    _closed: bool = False

    @property
    def able(self) -> bool:
        """Whether it may generate."""
        return self.healthy and self.current

    async def close(self) -> None:
        """Ask it nothing more: whoever does, or waits for an answer, is told ServerDown."""
        self._closed = True
        await self.drop()

    async def drop(self) -> None:
        """Close all connections to it: whoever waits for an answer is told ServerDown."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ── exchanges ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> Any:
        """One HTTP exchange, a look if it has `seconds` of its own."""
        async with self._response(method, path, body, seconds) as response:
            content = await response.read()
        return orjson.loads(content) if content else None  # SGLang answers some orders with nothing

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        """What `/generate` answers, for each prompt: once, as often as it grows (`stream`), not if aborted."""
        with suppress(Interrupted):
            if not body.get("stream"):
                yield await self.ask("POST", "/generate", body)
                return
            async with self._response("POST", "/generate", body) as response:
                async for answer in read_events(str(response.url), response.content):
                    yield [answer]

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, unless its status is an error: see `check_status`."""
        where, data = self.url + path, None if body is None else orjson.dumps(body)
        most, streamed = seconds or self.seconds, body and body.get("stream")  # that lasts as long as it is not silent
        timeout = aiohttp.ClientTimeout(None if streamed else most, sock_connect=CONNECT_SECONDS, sock_read=most)
        waited_for = int(seconds is None)  # a look is not
        self.asks += waited_for
        try:
            async with self._connections().request(method, where, data=data, timeout=timeout) as response:
                if response.status >= 400:
                    check_status(where, response.status, reason_of(await response.read()))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            setting = "" if seconds else ", which is inference.request_timeout_seconds"
            silent = f"no answer within {most:g} s{setting}"  # a timeout itself says nothing
            raise ServerDown(f"{where}: {str(error) or silent}") from error
        finally:
            self.asks -= waited_for

    def _connections(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerDown(f"{self.url} is not used any more")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(headers=self.headers, connector=connector)
        return self._session

    # ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pause(self, mode: str) -> None:
        """Stop generating until `go_on`."""
        self.paused = True  # also if its answer is lost
        await self.ask("POST", "/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        """Generate again, if it was paused."""
        if self.paused:
            await self.ask("POST", "/continue_generation", {})
            self.paused = False

    async def settle(self, lends: bool, goes_on: bool) -> None:
        """Give or take the memory of its cache as is wanted, and go on generating, if it has not yet."""
        async with self.orders:
            if lends and not self.lends:
                self.lends = True  # whatever comes of it, nothing is generated from here on
                while self._tokens:
                    await asyncio.wait(self._tokens)
                await self.ask("POST", "/release_memory_occupation", CACHE)
            elif self.lends and not lends:
                await self.ask("POST", "/resume_memory_occupation", CACHE)
                self.lends = False
            if goes_on:
                await self.go_on()

    async def drained(self, busy: Busy) -> None:
        """Return when no request is under way, of this client or of others."""
        waits = self.requests + (await busy()).get(self.url, 0)
        if waits:
            log.info("new weights wait for the end of %d requests (rollout.interruption: drain)", waits)
        while self.requests + (await busy()).get(self.url, 0):
            await asyncio.sleep(POLL_SECONDS)

    async def load_weights(self, target: Target, flags: Mapping[str, bool]) -> None:
        """Load these weights."""
        body = {"model_path": target.uri, "weight_version": str(target.version), **flags}
        answer = await self.ask("POST", "/update_weights_from_disk", body)
        if not answer.get("success", True):
            raise BadRequest(f"{self.url} did not load {target.uri}: {answer.get('message')}")

    # ── what it says of itself ──────────────────────────────────────────────────────────────────────────────────────

    async def ask_version(self) -> str:
        """The name of the weights it holds; `version` follows it, where it is a number."""
        name = str((await self.ask("GET", "/model_info"))["weight_version"])
        self.version = int(name) if name.isdecimal() else None
        return name

    async def probe(self, token: bool) -> object:
        """The heartbeat that it is well: something new whenever it has got on.

        It is the count of its steps, where it tells them and has work of ours. Else, with `token`, it is that it
        generates one, unless it was told to stop. Else it is that it answers, which SGLang's scheduler does itself:
        nobody can tell how far an order is.
        """
        info = await self.ask("GET", "/server_info", seconds=LOOK_SECONDS)
        if (self.requests or self.elsewhere) and "steps" in info and not info["paused"]:
            return info["steps"]
        if token and not (self.paused or self.lends):
            look = asyncio.ensure_future(self.ask("GET", "/health_generate", seconds=LOOK_SECONDS))
            self._tokens.add(look)
            look.add_done_callback(self._tokens.discard)
            await look
        return object()

    async def heartbeat(self, token: bool) -> Heartbeat:
        """The same, and what it has to do, for whoever watches it."""
        requests = self.requests + self.elsewhere
        work = f"{requests} requests under way" if requests else "an order under way"
        try:
            return Heartbeat(await self.probe(token), work)
        except (ServerDown, BadRequest) as error:
            return Heartbeat(None, f"{work}; {error}")


@dataclass
class Router:
    """Sends a request to the server that has the least to do, counted in samples: a slower one so gets fewer."""

    servers: list[Server]
    affinity: dict[int, Server] = field(default_factory=dict)  # of groups

    def free(self, floor: int = 0) -> list[Server]:
        """Servers with room that may generate, and are known to hold weights of at least version `floor`."""
        room = [server for server in self.servers if server.able and server.requests < server.slots]
        return [server for server in room if (server.version or 0) >= floor]

    def choose(self, group: int, floor: int = 0) -> Server | None:
        """The server for a request of `group`; none if it has to wait.

        Among servers that have equally much to do, it is the one that has the group's prompt in its cache.
        """
        if not (free := self.free(floor)):
            return None
        least = min(server.load for server in free)
        alike = [server for server in free if server.load == least]
        known = self.affinity.get(group)
        return known if known in alike else min(alike, key=lambda server: server.done)

    def begin(self, server: Server, group: int, samples: int) -> None:
        """A request goes to `server`."""
        if len(self.affinity) >= AFFINITIES:
            self.affinity.clear()
        self.affinity[group] = server
        server.requests += 1
        server.load += samples

    def end(self, server: Server, samples: int) -> None:
        """The request is over."""
        server.requests -= 1
        server.load -= samples
        server.done += samples


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_status(where: str, status: int, reason: str) -> None:
    """Raise what a status of 400 or more means: ServerDown, BadRequest or Interrupted. `where`: who answered what."""
    if status >= 500:
        raise ServerDown(f"{where} answered {status}: {reason}")
    if status == INTERRUPTED:
        raise Interrupted
    if status >= 400:
        raise BadRequest(f"{where} answered {status}: {reason}")


def reason_of(content: bytes) -> str:
    """The server's error message, out of `{"error": …}` or `{"message": …}` where it sent that."""
    try:
        found = orjson.loads(content)
        error = found["error"] if "error" in found else found["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:500].decode(errors="replace")
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


async def read_events(where: str, content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The answers that a stream of server-sent events brings; the one with a finish reason when the stream has ended.

    Raises what an event says that tells of an error, and ServerDown if the stream ends before the answer does.
    """
    last: dict[str, Any] | None = None
    async for event in _data(content):
        answer = orjson.loads(event)
        _check_event(where, event, answer)
        if answer["meta_info"]["finish_reason"] is None:
            yield answer
        else:
            last = answer
    if last is None:
        raise ServerDown(f"{where}: the stream ended before the answer")
    yield last


async def _data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """What follows `data: ` in each event but the last, which says that there are no more."""
    rest = b""
    async for piece in content.iter_any():  # an event may be longer than what the reader takes for a line
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if (data := event.removeprefix(b"data: ")) != b"[DONE]":
                yield data


def _check_event(where: str, event: bytes, answer: dict[str, Any]) -> None:
    if "error" in answer:
        check_status(where, int(answer["error"]["code"]), reason_of(event))
    reason = answer["meta_info"]["finish_reason"] or {}
    check_status(where, int(reason.get("status_code") or 200), str(reason.get("message")))


def version_runs(meta: dict[str, Any]) -> list[tuple[Any, int]]:
    """(version, tokens) of an answer's segments; the embedded server tells where weights changed on the way."""
    if "weight_versions" in meta:
        return list(meta["weight_versions"])
    tokens = len(meta["output_token_logprobs"])
    return [(meta["weight_version"], tokens)] if tokens else []


def stale_runs(meta: dict[str, Any]) -> list[tuple[bool, int]]:
    """(whether the cache held keys and values of older weights, tokens) of an answer's segments."""
    return list(meta.get("stale_kv", [(False, len(meta["output_token_logprobs"]))]))


def each_token(runs: Iterable[tuple[T, int]]) -> list[T]:
    """The value of each token, out of (value, tokens) of segments."""
    return [value for value, count in runs for _ in range(count)]
