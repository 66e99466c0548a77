"""One inference server: its requests in flight, its commands over SGLang's native API, and its state.

SGLang (0.5.17) reports an error by the HTTP status, or by an event if a stream has begun. It has no safeguards: it
crashes if it generates while the trainer has the memory of its KV cache, if it is asked to release memory during
generation, or to release or resume memory twice. It answers `/health`, like `/health_generate`, by generating a token.
So all health checks go through `Server.probe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp
import orjson

from areal_tasks.engines.access import Access
from areal_tasks.engines.external import STORE_OF
from areal_tasks.engines.routing import Speed
from areal_tasks.engines.watchdog import Heartbeat
from schemas.errors import UserError
from schemas.recipe.derived import Interruption

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0
#: How long an idle connection is kept. Less than uvicorn's 5 s, which SGLang uses: a request that is sent while the
#: server closes the connection fails, which is no reason to evict the server.
IDLE_SECONDS: Final = 2.0
HEALTH_SECONDS: Final = 25.0  # timeout of a health check: SGLang itself answers 503 after 20 s without a token
QUEUE_SECONDS: Final = 5.0  # timeout of a question for its queue
CACHE: Final = {"tags": ["kv_cache"]}
INTERRUPTED: Final = 499  # SGLang's status for a request that was aborted before its model saw it


class ServerDown(Exception):
    """A server did not answer, cannot serve, or has wrong weights. The request may be repeated elsewhere."""


class BadRequest(UserError):
    """A server refused a request as wrong (HTTP 4xx); the message holds its reason."""


class Interrupted(Exception):
    """The request was aborted before anything was generated."""


@dataclass(frozen=True)
class Target:
    """The weights that servers are to hold. `key` distinguishes weights of one version, such as two attempts at it.

    `uri` is where servers load them from; None: only the trainer can send them.
    """

    version: int
    key: str = ""
    uri: str | None = None


@dataclass(frozen=True)
class InFlight:
    """What happens to the requests in flight on a server that takes new weights."""

    in_turns: bool  # servers load a share at a time, so that others generate
    drains: bool  # the weights wait until the requests have ended
    pause: str | None  # the mode in which generation is paused before, and continued after; None: it is not
    flags: dict[str, bool]  # of the command to load weights


def in_flight(mode: Interruption | None, continues: bool, sent: bool) -> InFlight:
    """The rule of the recipe's `mode`; None where no request is in flight when weights change.

    Weights `sent` by the trainer need servers that are paused. The command to load others ends all requests by itself,
    unless the server `continues` them after recomputing their cache, as the embedded engine does.
    """
    keeps = mode == "in_place"
    pause = "in_place" if keeps else "abort" if mode == "abort" and sent else None
    ends = not (keeps or (mode == "abort" and continues))
    return InFlight(mode is not None, mode == "drain", pause, {"flush_cache": not keeps, "abort_all_requests": ends})


@dataclass(eq=False)
class Server:
    """One server as a client sees it, in one event loop; `close()` it. Requests raise ServerDown or BadRequest."""

    url: str
    slots: int  # maximum number of requests in flight
    start: int = 0  # distinguishes processes at the same address
    healthy: bool = True
    current: bool = True  # it holds the target weights
    access: Access = field(default_factory=Access)
    seconds: float = 60.0  # timeout of a request or a command
    version: int | None = None  # the newest weights it is known to hold
    older: bool = False  # it generates with older weights until its turn to load the target
    other_requests: int = 0  # requests of other clients in flight, as last reported
    failing_since: float | None = None  # the first failure since it last answered, by the pool's clock
    failures: int = 0  # since then
    admitted: float = 0.0  # when it was last admitted
    requests: int = 0  # of this client, in flight
    asks: int = 0  # requests and commands in flight; no health checks
    paused: bool = False  # it was, or may have been, asked to pause generation, and not yet to continue
    loads: bool = False  # the target weights, with which it is about to generate
    held: bool = False  # another client alone uses it: it gets no requests and no weights from this one
    cache_released: bool = False  # its KV cache, for the trainer: it must not generate
    load: int = 0  # samples in flight
    done: int = 0  # samples answered
    speed: Speed = field(default_factory=Speed)
    commands: asyncio.Lock = field(default_factory=asyncio.Lock)  # held during a command
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is given the target weights
    _tokens: set[asyncio.Future[Any]] = field(default_factory=set)  # health checks in flight that generate a token
    _session: aiohttp.ClientSession | None = None  # the connections to this server, so that they are closed together
    _closed: bool = False

    @property
    def may_generate(self) -> bool:
        return self.healthy and (self.current or self.older) and not self.held

    @property
    def coming(self) -> bool:
        """Whether it is worth to wait for it, since it may generate soon."""
        return self.loads and self.healthy and not self.held

    @property
    def waits_for(self) -> str:
        """Why it may not generate now; empty if it may.

        `answers`: it does not answer; `weights`: it lacks these or is paused; `release`: another client uses it.
        """
        if not self.healthy:
            return "answers"
        if self.held:
            return "release"
        return "weights" if self.paused or not (self.current or self.older) else ""

    async def close(self) -> None:
        """Close all connections for good: requests in flight, and later ones, raise ServerDown."""
        self._closed = True
        await self.drop()

    async def drop(self) -> None:
        """Close all connections: requests in flight raise ServerDown."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def begin(self, samples: int, now: float) -> None:
        """Count a request for so many samples as in flight."""
        self.speed.passed(now, self.requests > 0)
        self.requests += 1
        self.load += samples

    def end(self, samples: int, now: float) -> None:
        """Count a request for so many samples as ended."""
        self.speed.passed(now, self.requests > 0)
        self.requests -= 1
        self.load -= samples
        self.done += samples

    # ── exchanges ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def ask(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        """One HTTP exchange, a POST if it has a body; with `seconds`, a timeout of its own, it is a health check."""
        async with self._response(path, body, seconds) as response:
            content = await response.read()
        return orjson.loads(content) if content else None  # SGLang answers some commands with an empty body

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        """The answers of `/generate`, one per prompt: once, or growing (`stream`); none if aborted at once."""
        with suppress(Interrupted):
            if not body.get("stream"):
                yield await self.ask("/generate", body)
                return
            async with self._response("/generate", body) as response:
                async for answer in read_events(str(response.url), response.content):
                    yield [answer]

    @asynccontextmanager
    async def _response(
        self, path: str, body: dict[str, Any] | None, seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, unless its status is an error: see `check_status`."""
        where, method = self.url + path, "GET" if body is None else "POST"
        data = None if body is None else orjson.dumps(body)
        limit, streamed = seconds or self.seconds, body and body.get("stream")  # in a stream it limits each read
        timeout = aiohttp.ClientTimeout(None if streamed else limit, sock_connect=CONNECT_SECONDS, sock_read=limit)
        counted = int(seconds is None)  # a health check is not
        self.asks += counted
        try:
            async with self._connections().request(method, where, data=data, timeout=timeout) as response:
                if response.status >= 400:
                    check_status(where, response.status, reason_of(await response.read()))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            setting = "" if seconds else ", which is inference.request_timeout_seconds"
            silent = f"no answer within {limit:g} s{setting}"  # a timeout has no message
            raise ServerDown(f"{where}: {str(error) or silent}") from error
        finally:
            self.asks -= counted

    def _connections(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerDown(f"{self.url} is no longer used")
        if self._session is None:
            connector = self.access.connector(keepalive_timeout=IDLE_SECONDS)
            headers = {"Content-Type": "application/json"} | self.access.headers
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pause(self, mode: str) -> None:
        """Pause generation until `resume`."""
        self.paused = True  # even if the answer is lost
        await self.ask("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        if self.paused:
            await self.ask("/continue_generation", {})
            self.paused = False

    async def release_cache(self, released: bool, resumes: bool) -> None:
        """Release its KV cache, or allocate it again unless `released`; then continue generation if `resumes`."""
        async with self.commands:
            if released and not self.cache_released:
                self.cache_released = True  # from here on nothing is generated, even if the command fails
                while self._tokens:
                    await asyncio.wait(self._tokens)
                await self.ask("/release_memory_occupation", CACHE)
            elif self.cache_released and not released:
                await self.ask("/resume_memory_occupation", CACHE)
                self.cache_released = False
            if resumes:
                await self.resume()

    async def reads(self, store: str) -> bool:
        """Whether the server loads weights from this store by itself, which plain SGLang does not."""
        try:
            answer = await self.ask(STORE_OF, seconds=HEALTH_SECONDS)
        except BadRequest:
            return False
        return bool(answer["url"] == store)

    async def load_weights(self, target: Target, flags: Mapping[str, bool]) -> None:
        body = {"model_path": target.uri, "weight_version": str(target.version), **flags}
        answer = await self.ask("/update_weights_from_disk", body)
        if not answer.get("success", True):
            raise BadRequest(f"{self.url} did not load {target.uri}: {answer.get('message')}")

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def ask_version(self) -> str:
        """The name of the weights that the server holds, asked for now; sets `version` to it, None if not a number."""
        name = str((await self.ask("/model_info"))["weight_version"])
        self.version = int(name) if name.isdecimal() else None
        return name

    async def probe(self, token: bool) -> object:
        """A heartbeat: a value that changes whenever the server has made progress.

        It is the number of steps if the server reports that and has requests in flight. Otherwise every answer counts
        as progress: with `token`, a generated token, unless the server must not generate; else the answer of SGLang's
        scheduler, since the progress of a command is unknown.
        """
        info = await self.ask("/server_info", seconds=HEALTH_SECONDS)
        if (self.requests or self.other_requests) and "steps" in info and not info["paused"]:
            return info["steps"]
        if token and not (self.paused or self.cache_released):
            check = asyncio.ensure_future(self.ask("/health_generate", seconds=HEALTH_SECONDS))
            self._tokens.add(check)
            check.add_done_callback(self._tokens.discard)
            await check
        return object()

    async def queue(self, reports: bool) -> tuple[int, int | None]:
        """The samples that it decodes, and its queue; unless it `reports` them: the known requests, and None."""
        if not reports:
            return self.requests + self.other_requests, None
        info = await self.ask("/server_info", seconds=QUEUE_SECONDS)
        return info["running"], info["queued"]

    async def heartbeat(self, token: bool) -> Heartbeat:
        """`probe` as a `Heartbeat`, with a description of the server's work; an error becomes part of it.

        `token`: a server with requests in flight may be asked for one.
        """
        requests = self.requests + self.other_requests
        work = f"{requests} requests in flight" if requests else "a command in progress"
        try:
            return Heartbeat(await self.probe(token and requests > 0), work)
        except (ServerDown, BadRequest) as error:
            return Heartbeat(None, f"{work}; {error}")


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_status(where: str, status: int, reason: str) -> None:
    """Raise ServerDown, BadRequest or Interrupted for a status of 400 or more. `where`: the URL that answered."""
    if status >= 500:
        raise ServerDown(f"{where} answered {status}: {reason}")
    if status == INTERRUPTED:
        raise Interrupted
    if status >= 400:
        raise BadRequest(f"{where} answered {status}: {reason}")


def reason_of(content: bytes) -> str:
    """The server's error message, from `{"error": …}` or `{"message": …}` if it sent that, else the body's start."""
    try:
        found = orjson.loads(content)
        error = found["error"] if "error" in found else found["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:500].decode(errors="replace")
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


async def read_events(where: str, content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The answers in a stream of server-sent events; the one with a finish reason follows the end of the stream.

    Raises the error that an event reports, and ServerDown if the stream ends before the answer is complete.
    """
    last: dict[str, Any] | None = None
    async for event in _data(content):
        answer = orjson.loads(event)
        if "error" in answer:
            check_status(where, int(answer["error"]["code"]), reason_of(event))
        if (ended := answer["meta_info"]["finish_reason"]) is None:
            yield answer
        else:
            check_status(where, int(ended.get("status_code") or 200), str(ended.get("message")))
            last = answer
    if last is None:
        raise ServerDown(f"{where}: the stream ended before the answer")
    yield last


async def _data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event, without the last, which marks the end of the stream."""
    rest = b""
    async for piece in content.iter_any():  # an event may be longer than the reader's limit for a line
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if (data := event.removeprefix(b"data: ")) != b"[DONE]":
                yield data


def version_runs(meta: dict[str, Any]) -> list[tuple[Any, int]]:
    """(version, tokens) of each segment of an answer; one segment if the server reports only one version."""
    if "weight_versions" in meta:
        return list(meta["weight_versions"])
    tokens = len(meta["output_token_logprobs"])
    return [(meta["weight_version"], tokens)] if tokens else []


def stale_runs(meta: dict[str, Any]) -> list[tuple[bool, int]]:
    """(whether the KV cache held values of older weights, tokens) of each segment of an answer."""
    return list(meta.get("stale_kv", [(False, len(meta["output_token_logprobs"]))]))


def each_token(runs: Iterable[tuple[T, int]]) -> list[T]:
    """The value of each token, from the (value, tokens) of each segment."""
    return [value for value, count in runs for _ in range(count)]
