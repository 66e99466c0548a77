"""The inference servers of a run as one: which there are, which are well, the weights they hold, pauses and memory.

A server may generate when it is healthy and holds the weights that are wanted. One that fails is evicted at once; one
that has requests and does not get on is found out by probes. A task in the background probes an evicted server, or one
that has just joined, until it is well, and has it load what it lacks; the other servers go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from areal_tasks.engines.external import PROBE, check_temperature, check_versions_told
from areal_tasks.engines.server import POLL_SECONDS, Router, Server, ServerDown, Target, WrongVersion, making_way
from areal_tasks.engines.sharing import Followers, NoFollowers, Serving, SharedServer
from areal_tasks.engines.watchdog import Heartbeat
from schemas.errors import UserError
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)
S = TypeVar("S", Server, None)
T = TypeVar("T")

NO_SERVER_SECONDS: Final = 10.0  # how long a request waits when every server is evicted and none is restarted
PROBE_SECONDS: Final = (0.1, 5.0)  # pause before the first look at an evicted server, and the longest between two
LOST_SECONDS: Final = 20.0  # a server that has failed for longer is worth a restart
WATCH_SECONDS: Final = 20.0  # pause between two looks at a server with requests under way
WATCH_FAILURES: Final = 3  # looks in a row without progress after which it counts as hung


class ServerPool(ABC):
    """Use within one event loop; `close()` when done. `patience`: seconds to wait while no server is well.

    Weights are the business of one client of the servers, in the flow: it is told which are wanted. Where none are,
    a server generates with what it holds, which may change at any time, and is never made to generate by a look.
    """

    def __init__(
        self, urls: Iterable[str], token: str, settings: Inference, patience: float | None, mode: Interruption | None
    ) -> None:
        self.settings = settings
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self.servers = [self._server(url) for url in urls]
        self.router = Router(self.servers)
        self.clock: Callable[[], float] = time.monotonic
        self.target: Target | None = None
        self.paused = False  # the servers were told to stop generating, and not yet to go on
        self._lends = False  # the servers are to lend the memory of their cache
        embedded = settings.engine == "embedded"
        self._loading, self._handing = (making_way(mode, embedded, handed) for handed in (False, True))
        self._foreign = False  # others have started the servers
        self._versions_unknown = False  # what servers answer to requests under way counts for nothing
        self.followers: Followers = NoFollowers()  # clients that generate on the servers, too
        self.report: Callable[[str, str], object] = lambda url, why: None  # tells who looks after them what fails
        self._closed = False
        self._patience = NO_SERVER_SECONDS if patience is None else patience
        self._tasks: dict[tuple[str, Server | None], asyncio.Task[None]] = {}  # at most one of a kind for each server
        self._last_error: Exception | None = None

    def _server(self, url: str, start: int = 0, healthy: bool = True, current: bool = True) -> Server:
        slots, seconds = self.settings.max_concurrent_requests, self.settings.request_timeout_seconds
        return Server(url, slots, start, healthy, current, self.headers, seconds)

    async def close(self) -> None:
        """Stop probing and close all connections. Whoever is at a request still is told ServerDown."""
        self._closed, self._last_error = True, ServerDown("this client of the servers is closed")
        for task in self._tasks.values():
            task.cancel()
        for server in self.servers:  # none is given out, or probed, from here on
            server.healthy = False
        self._dispatch()
        for server in self.servers:
            await server.close()

    @abstractmethod
    def _dispatch(self) -> None:
        """What may generate has changed: give requests that wait to the servers that can take them."""

    async def sync(self, starts: Mapping[str, int], current: Container[str]) -> None:
        """Have exactly these servers, whose numbers tell the processes apart that have listened at an address.

        What was under way on one that is gone is repeated elsewhere. A new one is let in when it is well and holds the
        weights that are wanted, as those in `current` do from their start.
        """
        await self._leave(starts)
        there = {server.url for server in self.servers}
        for url in [url for url in starts if url not in there]:
            server = self._server(url, starts[url], False, url in current)
            server.paused = self._foreign  # perhaps, by a run that ended before it could have them go on
            self.servers.append(server)
            self._background("admit", server, self._admit)
        self._dispatch()

    async def _leave(self, starts: Mapping[str, int]) -> None:
        """Have none but these starts of servers."""
        for server in [server for server in self.servers if starts.get(server.url) != server.start]:
            self.servers.remove(server)
            server.healthy = False
            for key in [key for key in self._tasks if key[1] is server]:
                self._tasks.pop(key).cancel()
            await server.close()

    @property
    def serving(self) -> Serving:
        """What clients have to know that generate on the same servers."""
        servers = (
            SharedServer(url=one.url, start=one.start, version=one.version, able=one.able) for one in self.servers
        )
        return Serving(servers=tuple(servers), versions_unknown=self._versions_unknown)

    async def follow(self, serving: Serving) -> None:
        """Have the servers that another client looks after, and send requests to those alone that it says."""
        await self._leave({one.url: one.start for one in serving.servers})
        known = {server.url: server for server in self.servers}
        for one in serving.servers:
            if (server := known.get(one.url)) is None:
                self.servers.append(server := self._server(one.url, one.start))
            server.current, server.version = one.able, one.version
        if serving.versions_unknown:
            await self._drop_all()
        self._dispatch()

    async def foreign(self, urls: Iterable[str]) -> None:
        """Have servers that others have started. Raises UserError if one cannot be used as it was started."""
        self._foreign = True
        await self.sync(dict.fromkeys(urls, 0), ())
        for outcome in await asyncio.gather(*map(self._check, self.servers), return_exceptions=True):
            if isinstance(outcome, UserError):
                raise outcome

    async def _check(self, server: Server) -> None:
        if self._foreign and not server.lends:
            answers = await server.ask("POST", "/generate", PROBE)
            check_temperature(server.url, answers)
            if self._loading.pause == "in_place":
                check_versions_told(server.url, answers)

    def healthy(self) -> list[str]:
        """Addresses of the servers that are not evicted."""
        return [server.url for server in self.servers if server.healthy]

    async def standing(self) -> list[str]:
        """The same, once servers that have just joined were looked at; at least one."""
        await self._looked_at()
        await self._until(lambda: any(server.healthy for server in self.servers))
        return self.healthy()

    async def _looked_at(self) -> None:
        """Wait until it is known of each server whether it is well."""
        await self._until(lambda: all(s.healthy or s.failing_since is not None for s in self.servers))

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds. ServerDown if it does not within the patience that there is."""
        began = self.clock()
        while not holds():
            if self._closed or self.clock() - began > self._patience:
                raise self._no_server()
            await asyncio.sleep(POLL_SECONDS)

    def _no_server(self) -> ServerDown:
        return ServerDown(f"no inference server answers; the last error: {self._last_error}")

    def lost(self) -> list[str]:
        """Addresses of servers that have failed for so long that they need a restart, and are at no order."""
        now = self.clock()
        since = {s.url: s.failing_since for s in self.servers if not (s.healthy or s.asks)}
        return [url for url, failed in since.items() if failed is not None and now - failed > LOST_SECONDS]

    async def heartbeats(self, everyone: bool = False) -> dict[str, Heartbeat]:
        """How each server that has something to do for this client (`everyone`: any server) gets on, by its address."""
        others = self.followers.under_way()
        for server in self.servers:
            server.elsewhere = others.get(server.url, 0)
        busy = [s for s in self.servers if s.healthy and (s.asks or s.elsewhere or everyone)]  # others are given up
        heartbeats = await asyncio.gather(*map(self._heartbeat, busy))
        return dict(zip([server.url for server in busy], heartbeats, strict=True))

    async def _heartbeat(self, server: Server) -> Heartbeat:
        return await server.heartbeat(token=self.target is not None and server.requests + server.elsewhere > 0)

    async def evict(self, failed: Mapping[str, str]) -> None:
        """Give nothing more to servers of which somebody else has seen that they failed: why, by their address."""
        for server in self.servers:
            if server.url in failed:
                self._evict(server, ServerDown(failed[server.url]))

    def _evict(self, server: Server, error: ServerDown) -> None:
        """Give it nothing more until it is well again."""
        if not server.healthy:
            return
        if self.clock() - server.admitted > LOST_SECONDS:
            server.failing_since = None  # it has been well since it last failed
        server.healthy = False
        self._note(server, error)
        self.report(server.url, str(error))
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

    def _background(self, kind: str, of: S, work: Callable[[S], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for the server (for none: for all), unless it is being done already."""
        task = self._tasks.get((kind, of))
        if task is None or task.done():
            self._tasks[kind, of] = asyncio.ensure_future(work(of))

    async def _watch(self, server: Server) -> None:
        """While requests are under way, see to it that the server gets on; drop its connections if it hangs."""
        silent, heartbeat = 0, Heartbeat(None, "")
        while silent < WATCH_FAILURES:
            await asyncio.sleep(WATCH_SECONDS)
            if not (server.requests and server.healthy):
                return
            before, heartbeat = heartbeat.progress, await self._heartbeat(server)
            silent = 0 if heartbeat.progress not in (None, before) else silent + 1
        self._evict(server, ServerDown(f"it hangs: {heartbeat.says}"))
        await server.drop()

    async def _admit(self, server: Server) -> None:
        """Probe a server until it is well, bring it to where the others are, and let it in."""
        while not server.healthy:
            first, longest = PROBE_SECONDS
            await asyncio.sleep(min(first * (2 ** min(server.failures, 10) - 1), longest))
            try:
                await self._settle(server)
                await server.probe(token=self.target is not None)
                await self._check(server)
                await self._catch_up(server)
                if server.lends != self._lends or (server.paused and not self.paused):
                    raise ServerDown(f"{server.url}: whether it is to lend its memory or to pause has just changed")
            except (ServerDown, UserError) as error:
                self._note(server, error)
                continue
            if server.failing_since is None or server.failures == 1:  # else it comes and goes
                again = server.start or server.failures
                log.log(logging.WARNING if again else logging.INFO, "inference server %s is let in", server.url)
            server.healthy, server.admitted = True, self.clock()
            self._dispatch()

    @property
    def version(self) -> int | None:
        """The weights version that all servers hold that generate, as far as known."""
        held = [server.version for server in self.servers if server.able and server.version is not None]
        return self.target.version if self.target else min(held, default=None)

    def wants(self, key: str) -> bool:
        """Whether the weights of that name are those that all servers are to hold."""
        return self.target is not None and self.target.key == key

    @property
    def stuck(self) -> bool:
        """Whether no server holds the weights that are wanted, nor can load them by itself: it has to be given them."""
        loadable = self.target is not None and self.target.uri is not None
        return not loadable and not any(server.current for server in self.servers)

    def _aim(self, target: Target) -> None:
        """From now on these weights are wanted. No server generates before it has confirmed that it holds them."""
        self.target = target
        self.router.affinity.clear()  # caches are flushed for new weights
        self._versions_unknown = False
        for server in self.servers:
            server.current = False
        self._dispatch()

    async def holding(self, version: int, key: str, uri: str | None) -> None:
        """These are wanted. Servers with those of this version that were wanted hold them; the others load them."""
        target = Target(version, key, uri)
        if self.target is not None and self.target.version != version:
            self._aim(target)
        self.target = target
        for server in self.servers:
            if server.healthy and not server.current and uri is not None:
                server.healthy = False
                self._background("admit", server, self._admit)
        self._dispatch()

    async def forget_versions(self) -> None:
        """The servers' weights may be damaged or not whole: none generates, and no answer counts, until given some."""
        self._forget_versions()
        self._versions_unknown = True
        await self.followers.told()
        await self._drop_all()

    async def _drop_all(self) -> None:
        """Let go of the requests under way: they are repeated."""
        for server in [server for server in self.servers if server.requests]:
            await server.drop()

    def _forget_versions(self) -> None:
        if self.target is not None:
            self._aim(replace(self.target, key="", uri=None))

    async def update_weights(self, uri: str, version: int, key: str = "") -> list[float]:
        """Load the weights manifest (or local folder) `uri` as `version` on every healthy server; seconds for each.

        Requests under way continue with the new weights, or the weights wait for their end. The other servers follow
        before they are let in. `key`: a name for `wants`.
        """
        if not self.healthy():
            await self._looked_at()
        self._aim(Target(version, key or uri, uri))
        await self.followers.told()
        seconds = await self.each(self._load)
        if not seconds:
            await self._until(lambda: any(server.able for server in self.servers))
        return seconds

    async def adopt(self, version: int, key: str, urls: Container[str]) -> list[str]:
        """The trainer handed the servers at `urls` this version; addresses of those that say so. Others are evicted."""
        target = Target(version, key)
        self._aim(target)

        async def confirmed(server: Server) -> str:
            await self._confirm(server, target)
            return server.url

        return await self.each(confirmed, urls)

    async def each(self, ask: Callable[[Server], Awaitable[T]], urls: Container[str] | None = None) -> list[T]:
        """Ask every healthy server (only those at `urls`) at once; what they answered. One that fails is evicted."""
        servers = [s for s in self.servers if s.healthy and (urls is None or s.url in urls)]
        outcomes = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerDown):
                self._evict(server, outcome)
        for outcome in outcomes:  # only now: who is down must not be forgotten over who refuses
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDown):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _load(self, server: Server) -> float:
        """Have one server load the target and say so."""
        started, target, server.current = time.perf_counter(), self.target, False
        assert target is not None
        if self._loading.drains:
            await server.drained(self.followers.busy)
        async with self._stopped(server, self._loading.pause):
            await server.load_weights(target, self._loading.flags)
        await self._confirm(server, target)
        return time.perf_counter() - started

    async def _confirm(self, server: Server, given: Target) -> None:
        """The server was given these weights: it may generate if it says that it has them and they are wanted still."""
        if (held := await server.ask_version()) != str(given.version):
            raise WrongVersion(f"{server.url} holds weights {held} after it was sent {given.version}")
        if given != self.target:
            raise WrongVersion(f"{server.url} has loaded {given}, and {self.target} is wanted now")
        server.current = True
        self._dispatch()

    async def _catch_up(self, server: Server) -> None:
        """Have the server load the target, unless it is known to hold just that, or has to be handed it."""
        await server.ask_version()
        if (target := self.target) is None:
            return
        if server.version != target.version:
            server.current = False
        if not server.current and target.uri is not None:
            await self._load(server)

    async def checksums(self) -> dict[str, list[dict[str, str]]]:
        """A checksum of each tensor, by its name, on each GPU of the SGLang servers, by their addresses."""
        found = await self._check_weights("checksum")
        return {url: [rank["checksums"] for rank in answer["ranks"]] for url, answer in found.items()}

    async def overwrite_weights(self) -> None:
        """Fill the tensors of SGLang servers, which must be paused, with random numbers; weights must follow."""
        self._forget_versions()
        await self._check_weights("reset_tensors")

    async def _check_weights(self, action: str) -> dict[str, Any]:
        """What each healthy server answers to `/weights_checker`, by its address. A server that fails is evicted."""

        async def ask(server: Server) -> tuple[str, Any]:
            return server.url, await server.ask("POST", "/weights_checker", {"action": action})

        return dict(await self.each(ask))

    async def release_memory(self) -> None:
        """Have the servers lend the memory of their cache until `resume_memory`: until then nobody may generate."""
        self._lends = True
        await self.each(self._settle)

    async def resume_memory(self) -> None:
        """Have the servers that lend that memory take it back."""
        self._lends = False
        await self.each(self._settle)

    async def _settle(self, server: Server) -> None:
        await server.settle(self._lends, goes_on=not self.paused)

    @asynccontextmanager
    async def _stopped(self, server: Server, mode: str | None) -> AsyncIterator[None]:
        """Inside, the server's requests stand still, unless there is no mode for that."""
        if mode is None:
            yield
            return
        async with server.orders:
            await server.pause(mode)
            try:
                yield
            finally:
                if not self.paused:
                    await server.go_on()

    async def interrupt(self) -> None:
        """Return when all servers stand still, so that the trainer may send weights; `resume` follows."""
        self._forget_versions()
        await self.followers.told()
        if self._handing.drains:
            await asyncio.gather(*(server.drained(self.followers.busy) for server in self.servers))
        if self._handing.pause:
            await self.pause(self._handing.pause)

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating on all servers; interrupted requests continue after `resume()`."""
        self.paused = True
        await self.each(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """Go on generating; servers that are evicted do before they are let in."""
        while any(server.healthy and server.paused for server in self.servers):  # one may be let in meanwhile
            await self.each(Server.go_on)
        self.paused = False
