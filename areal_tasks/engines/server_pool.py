"""The inference servers of a run as one: routing by load, eviction and re-admission by health, one weights version.

A request waits here, in order, until the router has a server for it. A server that fails is evicted at once and its
requests go elsewhere; one that stays silent is asked for its health, and evicted if it has none. In the background an
evicted server is asked until it answers; before it is let in again it is brought to the version that the others hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from areal_tasks.engines.answers import ABORTED, Interrupted, Refused, ServerDown, WrongVersion, version_runs
from areal_tasks.engines.connections import CLOSED, Connections
from areal_tasks.engines.lending import Lending, Lent
from areal_tasks.engines.routing import Router, Server
from areal_tasks.engines.watchdog import Sign
from schemas.errors import UserError
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS: Final = 4  # servers a request is tried on: one that kills its server must not kill them all
NO_SERVER_SECONDS: Final = 10.0  # how long a request waits when every server is evicted
PROBE_SECONDS: Final = (0.1, 5.0)  # first and longest pause between two looks at an evicted server
LOST_SECONDS: Final = 20.0  # a server that is evicted for longer is worth a restart
WATCH_SECONDS: Final = 20.0  # pause between two looks at a server with requests under way
WATCH_FAILURES: Final = 3  # looks in a row without an answer after which it counts as hung


@dataclass(eq=False)
class _Waiter:
    """A request without a server. Its future becomes the server and the time from which it is under way."""

    group: int
    samples: int
    given: asyncio.Future[tuple[Server, float]]


class ServerPool:
    """Use within one event loop; `close()` when done."""

    def __init__(self, urls: Iterable[str], token: str, settings: Inference, lent: Lent = Lent()) -> None:
        self.settings = settings
        self.servers = [Server(url, settings.max_concurrent_requests, lends=url in lent.by) for url in urls]
        if not self.servers:
            raise UserError("no inference server: give the address of at least one")
        self.router = Router(self.servers)
        self.connections = Connections(token, settings.request_timeout_seconds)
        self._ask = self.connections.ask
        self.lending = Lending(self._ask, lent.wanted)
        self.paused = False  # then nobody generates, and silence is no sign of illness
        self.version: int | None = None  # what every healthy server holds
        self._target: int | None = None  # what they are being brought to
        self._uri: str | None = None  # where the target's weights lie
        self._waiting: deque[_Waiter] = deque()
        self._tasks: dict[tuple[str, Server], asyncio.Task[None]] = {}  # at most one of a kind for each server
        self._end_of_hope: asyncio.TimerHandle | None = None  # runs while every server is evicted and requests wait
        self._last_error: ServerDown | None = None
        self._meeting = asyncio.Lock()

    async def close(self) -> None:
        """Stop probing and close all connections. Whoever is at a request still is told ServerDown."""
        for task in self._tasks.values():
            task.cancel()
        for server in self.servers:  # nobody is given one, and none is probed, from here on
            server.healthy = False
        self._last_error = ServerDown(CLOSED)
        if self._end_of_hope is not None:
            self._end_of_hope.cancel()
        self._give_up()
        await self.connections.close()

    async def signs(self, everyone: bool = False) -> dict[str, Sign]:
        """How each server gets on that has something to do, by address. One that is evicted is given up already."""
        busy = [server for server in self.servers if server.healthy and (server.asks or everyone)]
        return dict(zip([s.url for s in busy], await asyncio.gather(*map(self._sign, busy)), strict=True))

    async def _sign(self, server: Server) -> Sign:
        work = f"{server.requests} requests under way" if server.requests else "an order under way"
        try:
            return Sign(await self._progress(server), work)
        except (ServerDown, Refused) as error:
            return Sign(None, f"{work}; {error}")

    async def _progress(self, server: Server) -> object:
        """Something new whenever the server has got on: its count of steps, or that it generates, or that it answers.

        Nobody can tell how far an order is: while SGLang's scheduler is at one, it does not answer.
        """
        info = await self.lending.answers(server)
        if self.paused or not server.requests:
            return object()
        if "steps" in info:
            return info["steps"]
        await self.lending.look(server, self.paused)
        return object()

    def lost(self) -> list[str]:
        """Addresses of servers that have been evicted for so long that they will hardly recover."""
        now = self.router.clock()
        return [s.url for s in self.servers if not s.healthy and now - s.evicted > LOST_SECONDS]

    async def generate(
        self, group: int, body: Callable[[], dict[str, Any]], samples: int
    ) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
        """Send a `/generate` body to a server; its URL and answers, once or as often as they grow (`stream`).

        Retried elsewhere when a server fails: `body` makes what is sent, so that it can go on from what has come.
        """
        await self.meet()
        for _ in range(ATTEMPTS):
            server, started = await self._server_for(group, samples)
            finished = False
            try:
                async with aclosing(self._generate(server, body(), samples)) as answered:
                    async for answers in answered:
                        finished = all(_ended(answer) for answer in answers)
                        yield server.url, answers
                return
            except ServerDown as error:
                self.evict(server, error)
            finally:
                self.router.end(server, samples, started, finished)
                self._dispatch()
        raise ServerDown(f"{ATTEMPTS} servers failed to answer one request; the last: {self._last_error}")

    async def _generate(
        self, server: Server, body: dict[str, Any], samples: int
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        oldest = self.version
        self._background("watch", server, self._watch)
        try:
            async with aclosing(self.connections.answers(server, body)) as answered:
                async for answers in answered:
                    self._check_versions(server, answers, oldest)
                    yield answers
        except Interrupted:
            yield [ABORTED] * samples

    def _check_versions(self, server: Server, answers: list[dict[str, Any]], oldest: int | None) -> None:
        found = {int(version) for a in answers for version, _ in version_runs(a["meta_info"])}
        newest = self._target
        if oldest is not None and newest is not None and not all(oldest <= v <= newest for v in found):
            raise WrongVersion(f"{server.url} generated with weights {sorted(found)}, expected {oldest} to {newest}")

    async def _server_for(self, group: int, samples: int) -> tuple[Server, float]:
        """Wait for a server; the request counts as under way on it. ServerDown if there is none for too long."""
        if self.connections.closed:
            raise ServerDown(CLOSED)
        waiter = _Waiter(group, samples, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._dispatch()
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if waiter.given.done() and not waiter.given.cancelled():
                server, started = waiter.given.result()
                self.router.end(server, samples, started, finished=False)
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give waiting requests, in order, to the servers that the router chooses."""
        queued = sum(waiter.samples for waiter in self._waiting)
        while self._waiting:
            waiter = self._waiting[0]
            server = None
            if not waiter.given.done():  # else it was cancelled
                server = self.router.choose(waiter.group, waiter.samples, queued)
                if server is None:
                    break
                waiter.given.set_result((server, self.router.begin(server, waiter.group, waiter.samples)))
            queued -= waiter.samples
            self._waiting.popleft()
        if self._waiting and self._end_of_hope is None and not any(s.healthy for s in self.servers):
            self._end_of_hope = asyncio.get_running_loop().call_later(NO_SERVER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """No server has come back in time: whoever waits is told."""
        self._end_of_hope = None
        if any(s.healthy for s in self.servers):
            return
        error = ServerDown(f"no inference server answers; the last error: {self._last_error}")
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.given.done():
                waiter.given.set_exception(error)

    async def meet(self) -> int | None:
        """Learn, once, which version the servers hold. Raises WrongVersion when they do not agree."""
        async with self._meeting:
            if self.version is not None:
                return self.version
            held = {s.url: v for s in self.servers if (v := await self._held(s)) is not None}
            if len(set(held.values())) > 1:
                raise WrongVersion(f"the servers hold different weights: {held}; send them one version")
            self.version = self._target = next(iter(held.values()), None)
            return self.version

    async def _held(self, server: Server) -> int | None:
        try:
            held = str((await self._ask(server, "GET", "/model_info"))["weight_version"])
            return int(held) if held.isdecimal() else -1  # a server of somebody else's, with a name for what it holds
        except ServerDown as error:
            self.evict(server, error)
            return None

    async def update_weights(self, uri: str, version: int) -> list[float]:
        """Bring every healthy server to `version`; seconds for each. The others follow before they are let in again.

        What is being generated ends with what it has; SGLang would otherwise let it end first.
        """
        self._target, self._uri = version, uri
        seconds = await self._each(self._update)
        if not seconds:  # wait until one of them has caught up
            server, started = await self._server_for(-1, 0)
            self.router.end(server, 0, started, finished=False)
        self.version = version
        return seconds

    async def adopt(self, version: int) -> None:
        """Somebody else gave every healthy server `version`: have each say so. One that does not is evicted."""
        self._target, self._uri = version, None
        if await self._each(self._adopted):  # else nobody is known to hold it
            self.version = version

    async def _adopted(self, server: Server) -> None:
        await self._confirm(server)
        server.knows = True

    async def _each(self, ask: Callable[[Server], Awaitable[T]]) -> list[T]:
        """Ask every healthy server at once; what those answered that did not fail. The others are evicted."""
        servers = [s for s in self.servers if s.healthy]
        outcomes = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerDown):
                self.evict(server, outcome)
        for outcome in outcomes:  # only now: who is down must not be forgotten over who refuses
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDown):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _update(self, server: Server) -> float:
        """Bring one server to the target and have it say so."""
        started, server.knows = time.perf_counter(), False
        uri, version = self._uri, self._target
        where = {"model_path": uri, "weight_version": str(version)}
        body = where | {"flush_cache": True, "abort_all_requests": True}
        answer = await self._ask(server, "POST", "/update_weights_from_disk", body)
        if not answer.get("success", True):
            raise Refused(f"{server.url} did not load {uri}: {answer.get('message')}")
        await self._confirm(server)
        if (uri, version) != (self._uri, self._target):  # perhaps of the same number: another attempt at that version
            raise WrongVersion(f"{server.url} has loaded {uri}, and {self._uri} is wanted now")
        server.knows = True
        return time.perf_counter() - started

    async def _confirm(self, server: Server) -> None:
        held = (await self._ask(server, "GET", "/model_info"))["weight_version"]
        if str(held) != str(self._target):
            raise WrongVersion(f"{server.url} holds weights {held} after it was sent {self._target}")

    async def check_weights(self, action: str) -> dict[str, Any]:
        """What each healthy server answers to `/weights_checker`, by its address. A server that fails is evicted."""

        async def ask(server: Server) -> tuple[str, Any]:
            return server.url, await self._ask(server, "POST", "/weights_checker", {"action": action})

        return dict(await self._each(ask))

    async def overwrite_weights(self) -> None:
        """Have every healthy server put random numbers into its tensors: it holds no version until it is given one."""
        for server in self.servers:
            server.knows = server.knows and not server.healthy
        await self.check_weights("reset_tensors")

    async def broadcast(self, path: str, body: dict[str, Any]) -> None:
        """POST to every healthy server. A server that fails is evicted."""
        await self._each(lambda server: self._ask(server, "POST", path, body))

    async def lend(self, wanted: bool) -> None:
        """Have every healthy server lend the memory of its cache, or take it back; one that has already is not asked.

        The others follow before they are let in again.
        """
        self.lending.wanted = wanted
        await self._each(self.lending.settle)

    async def server_info(self) -> list[dict[str, Any]]:
        """`/server_info` of every healthy server."""
        return await self._each(lambda server: self._ask(server, "GET", "/server_info"))

    def evict(self, server: Server, error: ServerDown) -> None:
        """Give it nothing more until it is well again."""
        if not server.healthy:
            return
        log.warning("evicted inference server %s: %s", server.url, error)
        server.healthy, server.evicted, self._last_error = False, self.router.clock(), error
        self._background("probe", server, self._probe)
        self._dispatch()

    def _background(self, kind: str, server: Server, work: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for the server, unless it is being done already."""
        task = self._tasks.get((kind, server))
        if task is None or task.done():
            self._tasks[kind, server] = asyncio.ensure_future(work(server))

    async def _watch(self, server: Server) -> None:
        """While requests are under way, see to it that the server does generate; drop its connections if it hangs."""
        silent = 0
        while silent < WATCH_FAILURES:
            await asyncio.sleep(WATCH_SECONDS)
            if not (server.requests and server.healthy):
                return
            try:
                await self.lending.look(server, self.paused)
                silent = 0
            except (ServerDown, Refused) as error:
                silent, last = silent + 1, error
        self.evict(server, ServerDown(f"it hangs: {last}"))
        await self.connections.drop(server)

    async def _probe(self, server: Server) -> None:
        """Look at an evicted server until it is well, then let it in again."""
        pause, longest = PROBE_SECONDS
        while not server.healthy:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                await self._recover(server)
            except (ServerDown, UserError) as error:
                log.info("inference server %s stays evicted: %s", server.url, error)
                continue
            log.warning("inference server %s is well again", server.url)
            server.healthy = True
            if self._end_of_hope is not None:
                self._end_of_hope.cancel()
                self._end_of_hope = None
            self._dispatch()

    async def _recover(self, server: Server) -> None:
        """See to it that the server is well, and where the others are, with its memory and its weights."""
        await self.lending.settle(server)
        await self.lending.look(server, self.paused)
        await self._catch_up(server)
        if server.lends != self.lending.wanted:
            raise ServerDown(f"{server.url}: whether it lends its memory has changed meanwhile")

    async def _catch_up(self, server: Server) -> None:
        """See to it that the server holds the target version: not other files that somebody once gave that number."""
        held = (await self._ask(server, "GET", "/model_info"))["weight_version"]
        if self._target is None or (server.knows and str(held) == str(self._target)):
            return
        if self._uri is None:
            raise WrongVersion(f"it holds weights {held}, expected {self._target}")
        await self._update(server)


def _ended(answer: dict[str, Any]) -> bool:
    """Whether the answer is all there is to say, and was not interrupted."""
    reason = answer["meta_info"]["finish_reason"]
    return reason is not None and reason["type"] != "abort"
