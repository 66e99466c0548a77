"""The inference servers of a run as one: which there are, which of them may generate, and the weights they are to hold.

A request waits here, in order, until the router has a server for it. A server may generate when it is healthy and holds
the weights that are wanted. One that fails is evicted at once, and its requests go elsewhere; one that stays silent is
asked for its health, and evicted if it has none. A task in the background looks at an evicted server, or at one that
has just joined, until it is well, and has it load what it lacks; the other servers go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from areal_tasks.engines.answers import ABORTED, Interrupted, Refused, ServerDown, WrongVersion, check_versions
from areal_tasks.engines.connections import CLOSED, Connections
from areal_tasks.engines.external import PROBE, check_temperature
from areal_tasks.engines.interrupter import POLL_SECONDS, Interrupter
from areal_tasks.engines.lending import Lending
from areal_tasks.engines.routing import Router, Server, Target
from schemas.errors import UserError
from schemas.recipe.interruption import Interruption
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS: Final = 4  # servers a request is tried on: one that kills its server must not kill them all
NO_SERVER_SECONDS: Final = 10.0  # how long a request waits when every server is evicted and none is restarted
PROBE_SECONDS: Final = (0.1, 5.0)  # pause before the first look at an evicted server, and the longest between two
LOST_SECONDS: Final = 20.0  # a server that has failed for longer is worth a restart
WATCH_SECONDS: Final = 20.0  # pause between two looks at a server with requests under way
WATCH_FAILURES: Final = 3  # looks in a row without an answer after which it counts as hung


@dataclass(eq=False)
class _Waiter:
    """A request without a server."""

    group: int
    samples: int
    given: asyncio.Future[tuple[Server, Target | None]]  # with the weights that were wanted then: it holds them


class ServerPool:
    """Use within one event loop; `close()` when done. `patience`: seconds to wait while no server is well."""

    def __init__(
        self, urls: Iterable[str], token: str, settings: Inference, patience: float | None, mode: Interruption | None
    ) -> None:
        self.settings = settings
        self.servers = [Server(url, settings.max_concurrent_requests) for url in urls]
        self.router = Router(self.servers)
        self.clock: Callable[[], float] = time.monotonic
        self.connections = Connections(token, settings.request_timeout_seconds)
        self._ask = self.connections.ask
        self.lending = Lending(self._ask)
        self.interrupter = Interrupter(mode, settings.engine == "embedded", self.lending)
        self.foreign = False  # others have started the servers
        self.target: Target | None = None  # none: what the servers hold when they are first asked
        self._patience = NO_SERVER_SECONDS if patience is None else patience
        self._waiting: deque[_Waiter] = deque()
        self._tasks: dict[tuple[str, Server], asyncio.Task[None]] = {}  # at most one of a kind for each server
        self._end_of_hope: asyncio.TimerHandle | None = None  # runs while every server is evicted and requests wait
        self._last_error: Exception | None = None
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

    async def sync(self, starts: Mapping[str, int], current: Container[str]) -> None:
        """Have exactly these servers, whose numbers tell the processes apart that have listened at an address.

        What was under way on one that is gone is repeated elsewhere. A new one is let in when it is well and holds the
        weights that are wanted, as those in `current` do from their start.
        """
        for server in [server for server in self.servers if starts.get(server.url) != server.start]:
            self.servers.remove(server)
            server.healthy = False
            for key in [key for key in self._tasks if key[1] is server]:
                self._tasks.pop(key).cancel()
            await self.connections.drop(server)
        there = {server.url for server in self.servers}
        for url in starts.keys() - there:
            server = Server(url, self.settings.max_concurrent_requests, starts[url], False, url in current)
            server.paused = self.foreign  # perhaps, by a run that ended before it could have them go on
            self.servers.append(server)
            self._background("admit", server, self._admit)
        self._dispatch()

    async def check(self) -> None:
        """Raise a UserError if a server that answers was started such that it cannot be used."""
        for outcome in await asyncio.gather(*map(self._check, self.servers), return_exceptions=True):
            if isinstance(outcome, UserError):
                raise outcome

    async def _check(self, server: Server) -> None:
        if self.foreign and not server.lends:
            check_temperature(server.url, await self._ask(server, "POST", "/generate", PROBE))

    def lost(self) -> list[str]:
        """Addresses of servers that have failed for so long that they will hardly recover, and are at no order."""
        now = self.clock()
        since = {s.url: s.failing_since for s in self.servers if not (s.healthy or s.asks)}
        return [url for url, failed in since.items() if failed is not None and now - failed > LOST_SECONDS]

    async def generate(
        self, group: int, body: Callable[[], dict[str, Any]], samples: int
    ) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
        """Send a `/generate` body to a server; its URL and answers, once or as often as they grow (`stream`).

        Retried elsewhere when a server fails: `body` makes what is sent, so that it can go on from what has come.
        """
        await self.meet()
        for _ in range(ATTEMPTS):
            server, oldest = await self._server_for(group, samples)
            try:
                async with aclosing(self._generate(server, oldest, body(), samples)) as answered:
                    async for answers in answered:
                        yield server.url, answers
                server.failing_since = None
                return
            except ServerDown as error:
                self.evict(server, error)
            finally:
                self.router.end(server, samples)
                self._dispatch()
        raise ServerDown(f"{ATTEMPTS} servers failed to answer one request; the last: {self._last_error}")

    async def _generate(
        self, server: Server, oldest: Target | None, body: dict[str, Any], samples: int
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        self._background("watch", server, self._watch)
        try:
            async with aclosing(self.connections.answers(server, body)) as answered:
                async for answers in answered:
                    if oldest is not None and self.target is not None:
                        check_versions(server.url, answers, oldest.version, self.target.version)
                    yield answers
        except Interrupted:
            yield [ABORTED] * samples

    async def _server_for(self, group: int, samples: int) -> tuple[Server, Target | None]:
        """Wait for a server, and what it holds; the request counts as under way on it. ServerDown if none comes."""
        if self.connections.closed:
            raise ServerDown(CLOSED)
        waiter = _Waiter(group, samples, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._dispatch()
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if waiter.given.done() and not waiter.given.cancelled():
                self.router.end(waiter.given.result()[0], samples)
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give waiting requests, in order, to the servers that the router chooses."""
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.given.done():  # else it was cancelled
                server = self.router.choose(waiter.group)
                if server is None:
                    break
                self.router.begin(server, waiter.group, waiter.samples)
                waiter.given.set_result((server, self.target))
            self._waiting.popleft()
        if any(s.healthy for s in self.servers):
            if self._end_of_hope is not None:
                self._end_of_hope.cancel()
            self._end_of_hope = None
        elif self._waiting and self._end_of_hope is None and self._patience < math.inf:
            self._end_of_hope = asyncio.get_running_loop().call_later(self._patience, self._give_up)

    def _give_up(self) -> None:
        """No server has come back in time: whoever waits is told."""
        self._end_of_hope = None
        error = self._no_server()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.given.done():
                waiter.given.set_exception(error)

    def _no_server(self) -> ServerDown:
        return ServerDown(f"no inference server answers; the last error: {self._last_error}")

    @property
    def stuck(self) -> bool:
        """Whether no server holds the weights that are wanted, nor can load them by itself."""
        loadable = self.target is not None and self.target.uri is not None
        return not loadable and not any(server.current for server in self.servers)

    async def meet(self) -> None:
        """Where no weights are wanted yet, learn which the servers hold. Raises WrongVersion when they do not agree."""
        async with self._meeting:
            if self.target is not None:
                return
            held = set(await self.each(self._version_of))
            if len(held) > 1:
                raise WrongVersion(f"the servers hold different weights: {sorted(held)}; send them one version")
            for version in held:  # that of somebody else's server may have a name
                self.target = Target(int(version) if version.isdecimal() else -1)

    def aim(self, target: Target) -> None:
        """From now on these weights are wanted. No server generates before it has confirmed that it holds them."""
        self.target = target
        self.router.affinity.clear()  # caches are flushed for new weights
        for server in self.servers:
            server.current = False

    def hold(self, target: Target) -> None:
        """These are wanted. Servers with those of this version that were wanted hold them; the others load them."""
        if self.target is not None and self.target.version != target.version:
            self.aim(target)
        self.target = target
        for server in self.servers:
            if server.healthy and not server.current and target.uri is not None:
                server.healthy = False
                self._background("admit", server, self._admit)

    def doubt(self) -> None:
        """Nobody knows any more what the servers hold: they are to be given the weights once more."""
        if self.target is not None:
            self.aim(replace(self.target, key="", uri=None))

    async def update_weights(self, target: Target) -> list[float]:
        """Have every healthy server load `target`; seconds for each. The others follow before they are let in."""
        if not any(server.healthy for server in self.servers):
            await self._looked_at()
        self.aim(target)
        seconds = await self.each(self._update)
        if not seconds:
            await self._until(lambda: any(server.able for server in self.servers))
        return seconds

    async def adopt(self, target: Target, urls: Container[str]) -> list[str]:
        """Somebody else gave the servers at `urls` the weights; addresses of those that say so. Others are evicted."""
        self.aim(target)
        return await self.each(self._adopted, urls)

    async def _adopted(self, server: Server) -> str:
        await self._confirm(server)
        server.current = True
        self._dispatch()
        return server.url

    async def standing(self) -> list[str]:
        """Addresses of the servers that are well, once each was looked at and one is."""
        await self._looked_at()
        await self._until(lambda: any(server.healthy for server in self.servers))
        return [server.url for server in self.servers if server.healthy]

    async def _looked_at(self) -> None:
        """Wait until it is known of each server whether it is well."""
        await self._until(lambda: all(s.healthy or s.failing_since is not None for s in self.servers))

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds. ServerDown if it does not within the patience that there is."""
        began = self.clock()
        while not holds():
            if self.connections.closed or self.clock() - began > self._patience:
                raise self._no_server()
            await asyncio.sleep(POLL_SECONDS)

    async def each(self, ask: Callable[[Server], Awaitable[T]], urls: Container[str] | None = None) -> list[T]:
        """Ask every healthy server (only those at `urls`) at once; what they answered. One that fails is evicted."""
        servers = [s for s in self.servers if s.healthy and (urls is None or s.url in urls)]
        outcomes = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerDown):
                self.evict(server, outcome)
        for outcome in outcomes:  # only now: who is down must not be forgotten over who refuses
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDown):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _update(self, server: Server) -> float:
        """Have one server load the target and say so."""
        started, target, server.current = time.perf_counter(), self.target, False
        assert target is not None and target.uri is not None
        where = {"model_path": target.uri, "weight_version": str(target.version)}
        async with self.interrupter.update(server) as flags:
            answer = await self._ask(server, "POST", "/update_weights_from_disk", where | flags)
        if not answer.get("success", True):
            raise Refused(f"{server.url} did not load {target.uri}: {answer.get('message')}")
        await self._confirm(server)
        if target != self.target:
            raise WrongVersion(f"{server.url} has loaded {target}, and {self.target} is wanted now")
        server.current = True
        self._dispatch()
        return time.perf_counter() - started

    async def _confirm(self, server: Server) -> None:
        held, target = await self._version_of(server), self.target
        if target is not None and held != str(target.version):
            raise WrongVersion(f"{server.url} holds weights {held} after it was sent {target.version}")

    async def _version_of(self, server: Server) -> str:
        return str((await self._ask(server, "GET", "/model_info"))["weight_version"])

    async def lend(self, wanted: bool) -> None:
        """Have every healthy server lend the memory of its cache, or take it back; one that has already is not asked.

        The others follow before they are let in again.
        """
        self.lending.wanted = wanted
        await self.each(self.lending.settle)

    def evict(self, server: Server, error: ServerDown) -> None:
        """Give it nothing more until it is well again."""
        if not server.healthy:
            return
        if self.clock() - server.admitted > LOST_SECONDS:
            server.failing_since = None  # it has been well since it last failed
        server.healthy = False
        self._note(server, error)
        self._background("admit", server, self._admit)
        self._dispatch()

    def _note(self, server: Server, error: Exception) -> None:
        """Remember a failure; the log tells of the first since the server was well."""
        if server.failing_since is None:
            log.warning("evicted inference server %s: %s", server.url, error)
            server.failing_since, server.failures, self._last_error = self.clock(), 0, error
        else:
            log.debug("inference server %s stays evicted: %s", server.url, error)
        server.failures += 1

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
                await self.lending.look(server)
                silent = 0
            except (ServerDown, Refused) as error:
                silent, last = silent + 1, error
        self.evict(server, ServerDown(f"it hangs: {last}"))
        await self.connections.drop(server)

    async def _admit(self, server: Server) -> None:
        """Look at a server until it is well, bring it to where the others are, and let it in."""
        while not server.healthy:
            first, longest = PROBE_SECONDS
            await asyncio.sleep(min(first * (2 ** min(server.failures, 10) - 1), longest))
            try:
                await self.lending.settle(server)
                await self.lending.look(server)
                await self._check(server)
                await self._catch_up(server)
                if not self.lending.settled(server):
                    raise ServerDown(
                        f"{server.url}: whether it is to lend its memory or to pause has changed meanwhile"
                    )
            except (ServerDown, UserError) as error:
                self._note(server, error)
                continue
            if server.failing_since is None or server.failures == 1:  # else it comes and goes
                again = server.start or server.failures
                log.log(logging.WARNING if again else logging.INFO, "inference server %s is let in", server.url)
            server.healthy, server.admitted = True, self.clock()
            self._dispatch()

    async def _catch_up(self, server: Server) -> None:
        """Have the server load the target, unless it is known to hold just that, or has to be handed it."""
        held, target = await self._version_of(server), self.target
        if target is None:
            return
        if held != str(target.version):
            server.current = False
        if not server.current and target.uri is not None:
            await self._update(server)
