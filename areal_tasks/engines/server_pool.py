"""The inference servers of a run as one: routing by load, eviction and re-admission by health, one weights version.

A server that fails is evicted at once and its request goes elsewhere. In the background it is asked for its health
until it answers; before it is let in again it is brought to the weights version that the others hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp
import orjson

from schemas.errors import UserError
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS: Final = 4  # servers a request is tried on: one that kills its server must not kill them all
CONNECT_SECONDS: Final = 10.0
NO_SERVER_SECONDS: Final = 10.0  # how long a request waits when every server is evicted
PROBE_SECONDS: Final = (0.1, 5.0)  # first and longest pause between two looks at an evicted server
AFFINITIES: Final = 65536  # groups whose server is remembered
SMOOTHING: Final = 0.3  # weight of the newest measurement of a server's speed


class ServerDown(Exception):
    """A server did not answer, or answered that it cannot serve. The request may be repeated elsewhere."""


class WrongVersion(ServerDown):
    """A server generated with, or holds, other weights than it was told to."""


class Refused(UserError):
    """A server refused a request as wrong (HTTP 4xx); the message holds its reason."""


@dataclass(eq=False)
class Server:
    """One server as the client sees it."""

    url: str
    slots: asyncio.Semaphore
    healthy: bool = True
    load: int = 0  # samples under way
    seconds_per_sample: float | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def learn(self, seconds: float, load: int) -> None:
        """Take a request's duration into account, made while `load` samples were under way."""
        new = seconds / max(load, 1)
        old = new if self.seconds_per_sample is None else self.seconds_per_sample
        self.seconds_per_sample = (1 - SMOOTHING) * old + SMOOTHING * new


class ServerPool:
    """Use within one event loop; `close()` when done."""

    def __init__(self, urls: Iterable[str], token: str, settings: Inference) -> None:
        self.settings = settings
        self.servers = [Server(url, asyncio.Semaphore(settings.max_concurrent_requests)) for url in urls]
        if not self.servers:
            raise UserError("no inference server: give the address of at least one")
        self.version: int | None = None  # what every healthy server holds
        self._target: int | None = None  # what they are being brought to
        self._uri: str | None = None  # where the target's weights lie
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._http: aiohttp.ClientSession | None = None
        self._affinity: OrderedDict[int, Server] = OrderedDict()
        self._changed = asyncio.Event()  # set when a server is let in again
        self._last_error: ServerDown | None = None
        self._meeting = asyncio.Lock()

    async def close(self) -> None:
        """Stop probing and close all connections."""
        for server in self.servers:
            for task in server.tasks:
                task.cancel()
        if self._http is not None:
            await self._http.close()

    async def generate(self, group: int, body: dict[str, Any], samples: int) -> tuple[str, list[dict[str, Any]]]:
        """Send a `/generate` body to a server; its URL and answers. Retried elsewhere when a server fails."""
        await self._meet()
        for _ in range(ATTEMPTS):
            server = await self._pick(group, samples)
            try:
                return server.url, await self._generate(server, body, samples)
            except ServerDown as error:
                self._evict(server, error)
        raise ServerDown(f"{ATTEMPTS} servers failed to answer one request; the last: {self._last_error}")

    async def _generate(self, server: Server, body: dict[str, Any], samples: int) -> list[dict[str, Any]]:
        oldest = self.version
        with _Load(server, samples):
            async with server.slots:
                started, load = time.perf_counter(), server.load
                answers: list[dict[str, Any]] = await self._ask(server, "POST", "/generate", body)
                server.learn(time.perf_counter() - started, load)
        self._check_versions(server, answers, oldest)
        return answers

    def _check_versions(self, server: Server, answers: list[dict[str, Any]], oldest: int | None) -> None:
        found = {int(version) for a in answers for version, _ in version_runs(a["meta_info"])}
        newest = self._target
        if oldest is not None and newest is not None and not all(oldest <= v <= newest for v in found):
            raise WrongVersion(f"{server.url} generated with weights {sorted(found)}, expected {oldest} to {newest}")

    async def _pick(self, group: int, samples: int) -> Server:
        """The group's server if it is healthy, else the one that will probably be done first."""
        deadline = time.monotonic() + NO_SERVER_SECONDS
        while not (healthy := [s for s in self.servers if s.healthy]):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise ServerDown(f"no inference server answers; the last error: {self._last_error}") from None
        chosen = self._affinity.get(group)
        if chosen is None or not chosen.healthy:
            chosen = _quickest(healthy, samples)
        self._affinity[group] = chosen
        self._affinity.move_to_end(group)
        if len(self._affinity) > AFFINITIES:
            self._affinity.popitem(last=False)
        return chosen

    async def _meet(self) -> None:
        """Learn, once, which version the servers hold. Raises WrongVersion when they do not agree."""
        async with self._meeting:
            if self.version is not None:
                return
            held = {s.url: v for s in self.servers if (v := await self._held(s)) is not None}
            if len(set(held.values())) > 1:
                raise WrongVersion(f"the servers hold different weights: {held}; send them one version")
            self.version = self._target = next(iter(held.values()), None)

    async def _held(self, server: Server) -> int | None:
        try:
            return int((await self._ask(server, "GET", "/model_info"))["weight_version"])
        except ServerDown as error:
            self._evict(server, error)
            return None

    async def update_weights(self, uri: str, version: int) -> list[float]:
        """Bring every healthy server to `version`; seconds for each. The others follow before they are let in again."""
        self._target, self._uri = version, uri
        seconds = await self._each(self._update)
        if not seconds:
            await self._pick(-1, 0)  # until one of them has caught up
        self.version = version
        return seconds

    async def _each(self, ask: Callable[[Server], Awaitable[T]]) -> list[T]:
        """Ask every healthy server at once; what those answered that did not fail. The others are evicted."""
        servers = [s for s in self.servers if s.healthy]
        outcomes = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerDown):
                self._evict(server, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _update(self, server: Server) -> float:
        """Bring one server to the target and have it say so."""
        started = time.perf_counter()
        body = {"model_path": self._uri, "weight_version": str(self._target), "flush_cache": True}
        answer = await self._ask(server, "POST", "/update_weights_from_disk", body)
        if not answer.get("success", True):
            raise Refused(f"{server.url} did not load {self._uri}: {answer.get('message')}")
        held = (await self._ask(server, "GET", "/model_info"))["weight_version"]
        if str(held) != str(self._target):
            raise WrongVersion(f"{server.url} holds weights {held} after it was sent {self._target}")
        return time.perf_counter() - started

    async def broadcast(self, path: str, body: dict[str, Any]) -> None:
        """POST to every healthy server. A server that fails is evicted."""
        await self._each(lambda server: self._ask(server, "POST", path, body))

    async def server_info(self) -> list[dict[str, Any]]:
        """`/server_info` of every healthy server."""
        return await self._each(lambda server: self._ask(server, "GET", "/server_info"))

    def _evict(self, server: Server, error: ServerDown) -> None:
        if not server.healthy:
            return
        log.warning("evicted inference server %s: %s", server.url, error)
        server.healthy, self._last_error = False, error
        task = asyncio.ensure_future(self._probe(server))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)

    async def _probe(self, server: Server) -> None:
        """Look at an evicted server until it is well, then let it in again."""
        pause, longest = PROBE_SECONDS
        while not server.healthy:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                await self._ask(server, "GET", "/health")
                await self._catch_up(server)
            except (ServerDown, UserError) as error:
                log.info("inference server %s stays evicted: %s", server.url, error)
                continue
            log.warning("inference server %s is well again", server.url)
            server.healthy, server.load = True, 0
            self._changed.set()

    async def _catch_up(self, server: Server) -> None:
        """See to it that the server holds the target version."""
        held = (await self._ask(server, "GET", "/model_info"))["weight_version"]
        if self._target is None or str(held) == str(self._target):
            return
        if self._uri is None:
            raise WrongVersion(f"it holds weights {held}, expected {self._target}")
        await self._update(server)

    async def _ask(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One HTTP exchange. Raises ServerDown, or Refused with the server's reason."""
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._session().request(method, server.url + path, data=data) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerDown(f"{server.url}{path}: {error or type(error).__name__}") from error
        if response.status >= 500:
            raise ServerDown(f"{server.url}{path} answered {response.status}: {_reason(content)}")
        if response.status >= 400:
            raise Refused(f"{server.url}{path} answered {response.status}: {_reason(content)}")
        return orjson.loads(content)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(self.settings.request_timeout_seconds, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self._http


class _Load:
    """Counts samples as under way on a server."""

    def __init__(self, server: Server, samples: int) -> None:
        self.server, self.samples = server, samples

    def __enter__(self) -> None:
        self.server.load += self.samples

    def __exit__(self, *error: object) -> None:
        self.server.load = max(self.server.load - self.samples, 0)


def _quickest(servers: list[Server], samples: int) -> Server:
    """The server with the least expected time until `samples` more are done; one not measured yet counts as average."""
    known = [s.seconds_per_sample for s in servers if s.seconds_per_sample is not None]
    usual = sum(known) / len(known) if known else 1.0

    def expected(server: Server) -> float:
        each = usual if server.seconds_per_sample is None else server.seconds_per_sample
        return (server.load + samples) * each

    return min(servers, key=expected)


def version_runs(meta: dict[str, Any]) -> list[tuple[Any, int]]:
    """(version, tokens) of an answer's segments."""
    return meta.get("weight_versions") or [(meta["weight_version"], meta["completion_tokens"])]


def _reason(content: bytes) -> str:
    """The server's error message, out of `{"error": …}` where it sent that."""
    try:
        error = orjson.loads(content)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:500].decode(errors="replace")
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
