"""The set of a run's inference servers, which of them are healthy, and the requests that wait for one.

A server that fails is evicted immediately; one that has requests and makes no progress is detected by probes. A
background task probes an evicted server, or one that has just joined, until it is healthy and in the state of the
others (`UpdatedPool`), which continue meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from areal_tasks.engines.access import Access
from areal_tasks.engines.external import PROBE, check_temperature, check_versions_reported
from areal_tasks.engines.routing import choose
from areal_tasks.engines.server import Server, ServerDown, Target, in_flight
from areal_tasks.engines.sharing import Followers, Serving, SharedServer
from areal_tasks.engines.watchdog import Heartbeat
from schemas.errors import UserError
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)
S = TypeVar("S", Server, None)

POLL_SECONDS: Final = 0.05
NO_SERVER_SECONDS: Final = 10.0  # how long a request waits when every server is evicted and none is restarted
PROBE_SECONDS: Final = (0.1, 5.0)  # pause before the first probe of an evicted server, and the longest between two
LOST_SECONDS: Final = 20.0  # a server that has failed for longer is restarted
WATCH_SECONDS: Final = 20.0  # pause between two probes of a server with requests in flight
WATCH_FAILURES: Final = 3  # consecutive probes without progress after which a server counts as hung


class _Waiter(NamedTuple):
    """A request that waits for a server, which becomes the result of `given`."""

    floor: int
    samples: int
    given: asyncio.Future[Server]


class ServerPool(ABC):
    """Use within one event loop; `close()` when done. `patience`: seconds to wait while no server is healthy.

    One client of the servers, in the flow, manages them: it has target weights and gives them to the servers. In other
    clients a server generates with the weights that it holds, which may change at any time: `serving` of the managing
    client says which. There a probe never makes it generate.
    """

    def __init__(
        self,
        urls: Iterable[str],
        access: Access,
        settings: Inference,
        patience: float | None,
        mode: Interruption | None,
    ) -> None:
        self.settings = settings
        self.access = access
        self.servers = [self._server(url) for url in urls]
        self.clock: Callable[[], float] = time.monotonic
        self.target: Target | None = None
        self._target_since = 0.0  # by `clock`
        self.paused = False  # the servers were asked to pause generation, and not yet to continue
        self._released = False  # the servers are to release their KV caches
        embedded = settings.engine == "embedded"
        self._loading, self._receiving = (in_flight(mode, embedded, sent) for sent in (False, True))
        self._external = False  # the run has not started the servers
        self._versions_unknown = False  # answers to requests in flight must be discarded
        self.followers = Followers()  # other clients that generate on the servers
        self.report: Callable[[str, str], object] = lambda url, why: None  # reports failures to the managing client
        self._closed = False
        self._patience = NO_SERVER_SECONDS if patience is None else patience
        self._tasks: dict[tuple[str, Server | None], asyncio.Task[None]] = {}  # at most one per kind and server
        self._last_error: Exception | None = None
        self._waiting: deque[_Waiter] = deque()
        self._demand = 0  # samples of this client's requests, in flight and waiting

    def _server(self, url: str, start: int = 0, healthy: bool = True, current: bool = True) -> Server:
        slots, seconds = self.settings.max_concurrent_requests, self.settings.request_timeout_seconds
        return Server(url, slots, start, healthy, current, self.access, seconds)

    async def close(self) -> None:
        """Stop probing and close all connections. Requests in flight raise ServerDown."""
        self._closed, self._last_error = True, ServerDown("this client of the servers is closed")
        for task in self._tasks.values():
            task.cancel()
        for server in self.servers:  # none is chosen, or probed, from here on
            server.healthy = False
        self._dispatch()
        for server in self.servers:
            await server.close()

    @abstractmethod
    async def _prepare(self, server: Server) -> None:
        """Probe a server, and bring it to the state of the others. ServerDown or UserError if that fails."""

    async def sync(self, starts: Mapping[str, int], current: Container[str]) -> None:
        """Make these the pool's servers; their start numbers distinguish processes at the same address.

        Requests in flight on a removed server are retried on others. A new server is admitted when it is healthy and
        holds the target weights, as those in `current` do from their start.
        """
        await self._leave(starts)
        known = {server.url for server in self.servers}
        for url in [url for url in starts if url not in known]:
            server = self._server(url, starts[url], False, url in current)
            server.paused = self._external  # possibly, by a run that ended before it could continue generation
            self.servers.append(server)
            self._background("admit", server, self._admit)
        self._dispatch()

    async def _leave(self, starts: Mapping[str, int]) -> None:
        """Remove all servers except these starts."""
        for server in [server for server in self.servers if starts.get(server.url) != server.start]:
            self.servers.remove(server)
            server.healthy = False
            for key in [key for key in self._tasks if key[1] is server]:
                self._tasks.pop(key).cancel()
            await server.close()

    @property
    def serving(self) -> Serving:
        """What other clients of the same servers need to know."""
        servers = (
            SharedServer(
                url=one.url, start=one.start, version=one.version, may_generate=one.may_generate, coming=one.coming
            )
            for one in self.servers
        )
        requests = self.settings.max_concurrent_requests
        return Serving(servers=tuple(servers), versions_unknown=self._versions_unknown, requests=requests)

    async def follow(self, serving: Serving) -> None:
        """Take over the servers of the managing client, and send requests only to those that may generate."""
        await self._leave({one.url: one.start for one in serving.servers})
        known = {server.url: server for server in self.servers}
        for one in serving.servers:
            if (server := known.get(one.url)) is None:
                self.servers.append(server := self._server(one.url, one.start))
            server.current, server.version, server.loads = one.may_generate, one.version, one.coming
        await self.bound_requests(serving.requests)
        if serving.versions_unknown:
            await self._drop_all()
        self._dispatch()

    async def _drop_all(self) -> None:
        """Close the connections of requests in flight, which are retried."""
        for server in [server for server in self.servers if server.requests]:
            await server.drop()

    async def bound_requests(self, most: int) -> None:
        """Have at most so many requests in flight on each server from now on."""
        self.settings = self.settings.model_copy(update={"max_concurrent_requests": most})
        for server in self.servers:
            server.slots = most
        self._dispatch()

    async def use_external(self, urls: Iterable[str]) -> None:
        """Use servers that the run has not started. Raises UserError if one was started with unsuitable settings."""
        self._external = True
        await self.sync(dict.fromkeys(urls, 0), ())
        for outcome in await asyncio.gather(*map(self._check, self.servers), return_exceptions=True):
            if isinstance(outcome, UserError):
                raise outcome

    async def _check(self, server: Server) -> None:
        if self._external and not server.cache_released:
            answers = await server.ask("/generate", PROBE)
            check_temperature(server.url, answers)
            if self._loading.pause == "in_place":
                check_versions_reported(server.url, answers)

    async def read(self, store: str) -> bool:
        """Whether all servers that answer, at least one, load weights from that store by themselves."""
        found = await asyncio.gather(*(server.reads(store) for server in self.servers), return_exceptions=True)
        answers = [one for one in found if isinstance(one, bool)]
        return bool(answers) and all(answers)

    def healthy(self) -> list[str]:
        """Addresses of the servers that are neither evicted nor held."""
        return [server.url for server in self.servers if server.healthy and not server.held]

    def held(self) -> list[str]:
        """Addresses of the servers that another client alone uses."""
        return [server.url for server in self.servers if server.held]

    async def wait_healthy(self) -> list[str]:
        """`healthy()` once servers that have just joined were probed and at least one is healthy."""
        await self._all_probed()
        await self._until(lambda: bool(self.healthy()))
        return self.healthy()

    async def _all_probed(self) -> None:
        """Wait until each server is known to be healthy or to have failed."""
        await self._until(lambda: all(s.healthy or s.failing_since is not None for s in self.servers))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition()`. ServerDown after the pool's patience; time while a server is held does not count."""
        began = self.clock()
        while not condition():
            if self.held():
                began = self.clock()
            if self._closed or self.clock() - began > self._patience:
                raise self._no_server()
            await asyncio.sleep(POLL_SECONDS)

    def _no_server(self) -> ServerDown:
        return ServerDown(f"no inference server answers; the last error: {self._last_error}")

    def states(self) -> dict[str, str]:
        """Why each server may not generate now, by address: `Server.waits_for`. May be called from any thread."""
        return {server.url: server.waits_for for server in list(self.servers)}

    async def queues(self) -> dict[str, tuple[int, int | None]]:
        """`Server.queue` of each server that answers, by address."""
        self._count_other_requests()
        servers, reports = list(self.servers), self.settings.engine == "embedded"
        found = await asyncio.gather(*(server.queue(reports) for server in servers), return_exceptions=True)
        return {server.url: one for server, one in zip(servers, found, strict=True) if isinstance(one, tuple)}

    def _count_other_requests(self) -> None:
        """Note the requests of other clients in flight on each server, as last reported."""
        others = self.followers.under_way()
        for server in self.servers:
            server.other_requests = others.get(server.url, 0)

    def lost(self) -> list[str]:
        """Addresses of servers that have failed for so long that they need a restart, without a command in progress."""
        now = self.clock()
        since = {s.url: s.failing_since for s in self.servers if not (s.healthy or s.asks)}
        return [url for url, failed in since.items() if failed is not None and now - failed > LOST_SECONDS]

    async def heartbeats(self, everyone: bool = False) -> dict[str, Heartbeat]:
        """A heartbeat of each server that has work in progress (`everyone`: of every server), by its address."""
        self._count_other_requests()
        busy = [s for s in self.servers if s.healthy and (s.asks or s.other_requests or everyone)]  # others are evicted
        heartbeats = await asyncio.gather(*(server.heartbeat(self.target is not None) for server in busy))
        return dict(zip([server.url for server in busy], heartbeats, strict=True))

    async def evict(self, failed: Mapping[str, str]) -> None:
        """Evict the servers that another component saw fail: `failed` gives the reasons by address."""
        for server in self.servers:
            if server.url in failed:
                self._evict(server, ServerDown(failed[server.url]))

    def _evict(self, server: Server, error: ServerDown) -> None:
        """Send the server no requests until it is healthy again."""
        if not server.healthy:
            return
        if self.clock() - server.admitted > LOST_SECONDS:
            server.failing_since = None  # it has been healthy since it last failed
        server.healthy = False
        self._note(server, error)
        self.report(server.url, str(error))
        self._background("admit", server, self._admit)
        self._dispatch()

    def _note(self, server: Server, error: Exception) -> None:
        """Remember a failure; warn of the first since the server was healthy."""
        if server.failing_since is None:
            log.warning("evicted inference server %s: %s", server.url, error)
            server.failing_since, server.failures, self._last_error = self.clock(), 0, error
        else:
            log.debug("inference server %s stays evicted: %s", server.url, error)
        server.failures += 1

    def _background(self, kind: str, of: S, work: Callable[[S], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for the server (None: for all), unless such a task is running already."""
        task = self._tasks.get((kind, of))
        if task is None or task.done():
            self._tasks[kind, of] = asyncio.ensure_future(work(of))

    async def _watch(self, server: Server) -> None:
        """While requests are in flight, check that the server makes progress; drop its connections if it hangs."""
        silent, heartbeat = 0, Heartbeat(None, "")
        while silent < WATCH_FAILURES:
            await asyncio.sleep(WATCH_SECONDS)
            if not (server.requests and server.healthy):
                return
            before, heartbeat = heartbeat.progress, await server.heartbeat(self.target is not None)
            silent = 0 if heartbeat.progress not in (None, before) else silent + 1
        self._evict(server, ServerDown(f"it hangs: {heartbeat.says}"))
        await server.drop()

    async def _admit(self, server: Server) -> None:
        """Try to prepare a server until that succeeds, then admit it."""
        while not server.healthy:
            first, longest = PROBE_SECONDS
            await asyncio.sleep(min(first * (2 ** min(server.failures, 10) - 1), longest))
            try:
                await self._prepare(server)
            except (ServerDown, UserError) as error:
                self._note(server, error)
                continue
            if server.failing_since is None or server.failures == 1:  # else it fails again and again
                again = server.start or server.failures
                log.log(logging.WARNING if again else logging.INFO, "inference server %s is admitted", server.url)
            server.healthy, server.admitted = True, self.clock()
            self._dispatch()

    # ── requests that wait for a server ───────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _server_for(self, floor: int, samples: int, again: bool) -> AsyncIterator[Server]:
        """Wait for a server; inside, it counts the request as in flight. Raises ServerDown if none becomes healthy.

        A request that a server has failed to answer (`again`) precedes those that wait.
        """
        waiter = _Waiter(floor, samples, asyncio.get_running_loop().create_future())
        (self._waiting.appendleft if again else self._waiting.append)(waiter)
        self._demand += samples
        self._dispatch()
        try:
            server = await waiter.given
            self._background("watch", server, self._watch)
            yield server
        finally:
            self._demand -= samples
            if (given := waiter.given).done() and not given.cancelled() and given.exception() is None:
                given.result().end(samples, self.clock())
            self._dispatch()

    def _dispatch(self) -> None:
        """Assign waiting requests to servers, in order."""
        self.followers.changed()
        skipped, refused, room = [], math.inf, True  # this floor, or a higher one, waits for newer weights
        while self._waiting and room:
            waiter = self._waiting.popleft()
            if waiter.given.done():  # it was cancelled
                continue
            searched, request = waiter.floor < refused, (waiter.samples, self._demand)
            if searched and (server := choose(self.servers, waiter.floor, *request)):
                server.begin(waiter.samples, self.clock())
                waiter.given.set_result(server)
                continue
            skipped.append(waiter)
            if searched:
                refused, room = waiter.floor, choose(self.servers, 0, *request) is not None
        self._waiting.extendleft(reversed(skipped))
        if self._closed:
            self._give_up()
        elif self._waiting and not self.healthy():
            self._background("no server", None, self._no_server_timer)

    async def _no_server_timer(self, _: None) -> None:
        """Wait for a healthy server; if none becomes healthy in time, fail the waiting requests."""
        try:
            await self._until(lambda: any(server.healthy for server in self.servers))
        except ServerDown:
            self._give_up()

    def _give_up(self) -> None:
        """Fail all waiting requests with ServerDown."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.given.done():
                waiter.given.set_exception(self._no_server())
