"""The weights, pauses and memory of a run's inference servers.

A healthy server may generate if it holds, or waits in turn to load, the target weights, unless another client holds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from areal_tasks.engines.external import FETCH, folder_not_visible
from areal_tasks.engines.server import BadRequest, Server, ServerDown, Target
from areal_tasks.engines.server_pool import POLL_SECONDS, ServerPool

log = logging.getLogger(__name__)
T = TypeVar("T")

SLOWER_SECONDS: Final = 1.0  # by which one server may be slower to take weights than another, however fast that is


class UpdatedPool(ServerPool):
    """A pool whose servers are given weights."""

    async def _prepare(self, server: Server) -> None:
        """Probe a server, and give it the target weights; its cache is released, and it is paused, as theirs are."""
        await server.release_cache(self._released, resumes=not self.paused)
        await server.probe(token=self.target is not None)
        await self._check(server)
        await self._catch_up(server)
        if server.cache_released != self._released or (server.paused and not self.paused):
            raise ServerDown(f"{server.url}: whether it is to release its cache or to pause has just changed")

    @property
    def version(self) -> int | None:
        """The weights version that all generating servers hold, as far as known; with a target the newest of them."""
        held = [server.version for server in self.servers if server.may_generate and server.version is not None]
        return max(held, default=self.target.version) if self.target else min(held, default=None)

    def wants(self, key: str) -> bool:
        return self.target is not None and self.target.key == key

    @property
    def stuck(self) -> bool:
        """Whether no server has the target or can load it (the trainer has to send it), or this client is closed."""
        loadable = self.target is not None and self.target.uri is not None
        return self._closed or (not loadable and not any(server.current for server in self.servers))

    def _set_target(self, target: Target, in_turns: bool = False) -> None:
        """Make these weights the target. No server generates before it has confirmed that it holds them.

        With `in_turns`, those that hold older ones generate with them until they load the target.
        """
        self.target, self._target_since = target, self.clock()
        self._versions_unknown = False
        for server in self.servers:
            older = server.version is not None and server.version < target.version
            server.older, server.current = in_turns and server.may_generate and older, False
        self._dispatch()

    async def holding(self, target: Target) -> None:
        """Make these the target. Servers that hold this version already count as current; the others load it."""
        if self.target is not None and self.target.version != target.version:
            self._set_target(target)
        self.target = target
        for server in self.servers:
            self._update(server)
        self._dispatch()

    def _update(self, server: Server) -> None:
        """Have a healthy server without the target weights load them in the background, if it can by itself."""
        loadable = self.target is not None and self.target.uri is not None
        if loadable and server.healthy and not (server.current or server.held):
            server.healthy = False
            self._background("admit", server, self._admit)

    async def hold(self, key: str) -> tuple[Server, bool]:
        """Take a server out of use until `release`. Returns it, and whether it holds the weights of that name.

        If it does, its requests in flight continue. Otherwise they have ended: it can be given other, older weights.

        Waits while healthy servers get the target weights; ServerDown if none is healthy. If only the trainer has the
        weights, and does not send them, the wait is endless: the caller checks whether the pool is `stuck`.
        """
        while not (free := [s for s in self.servers if s.may_generate and s.current and not s.paused]):
            await self._until(lambda: bool(self.healthy()))
            await asyncio.sleep(POLL_SECONDS)
        server, wanted = min(free, key=attrgetter("load")), self.wants(key)
        server.held, server.current = True, wanted
        self._dispatch()
        try:
            await self.followers.acknowledged()
            if not wanted:
                await self._drained(server)
        except BaseException:
            await self.release(server)
            raise
        return server, wanted

    async def release(self, server: Server) -> None:
        """Use a held server again, as soon as it has the target weights.

        While the others are interrupted for weights from the trainer, its requests in flight end first: otherwise they
        would continue with the new weights.
        """
        if self.target is not None and not self.target.key:  # the versions are unknown
            await self._drained(server)
        server.held = False
        if server in self.servers:
            self._update(server)
            self._dispatch()

    async def _drained(self, server: Server) -> None:
        """Return when no request of this client or of others is in flight on the server."""
        logged = False
        while requests := server.requests + (await self.followers.busy()).get(server.url, 0):
            if not logged:
                log.info("the weights of %s change after the end of %d requests", server.url, requests)
            logged = True
            await asyncio.sleep(POLL_SECONDS)

    async def forget_versions(self) -> None:
        """Mark the versions as unknown: weights may be damaged. No server generates before it is given others."""
        self._forget_versions()
        self._versions_unknown = True
        await self.followers.acknowledged()
        await self._drop_all()

    def _forget_versions(self) -> None:
        if self.target is not None:
            self._set_target(replace(self.target, key="", uri=None))

    async def update_weights(self, uri: str, version: int, key: str = "") -> list[float]:
        """Load the weights manifest (or local folder) `uri` as `version` on every healthy server; seconds per server.

        Requests in flight continue with the new weights, or these wait for their end. If there may be any, at most half
        of the servers (rounded up) load at a time, while the others generate with older weights: not all stop, nor wait
        for one link to the store. Evicted ones load before they are admitted. `key`: the name for `wants`.
        """
        if not self.healthy():
            await self._all_probed()
        self._set_target(Target(version, key or uri, uri), self._loading.in_turns)
        servers, generates = len(self.healthy()), any(server.older for server in self.servers)
        turns = asyncio.Semaphore(-(-servers // 2) if generates else servers)
        loads = await self.each(partial(self._load_in_turn, turns))
        seconds = [one for one in loads if one is not None]
        if not seconds:
            await self._until(lambda: any(server.may_generate for server in self.servers))
        return seconds

    async def _load_in_turn(self, turns: asyncio.Semaphore, server: Server) -> float | None:
        """`_load` in turn; None if evicted before that. SGLang fetches from a store before it stops to generate."""
        async with turns, self._about_to_generate([] if server.older else [server]):  # those have others meanwhile
            assert self.target is not None and self.target.uri is not None
            fetches = "://" in self.target.uri and self.settings.engine == "sglang"
            if fetches and server.healthy and not server.current:
                await server.ask(FETCH, {"model_path": self.target.uri})
            if server.current or not server.healthy:
                return None
            server.older = False
            self._dispatch()
            await self.followers.acknowledged()
            return await self._load(server)

    @asynccontextmanager
    async def _about_to_generate(self, servers: Collection[Server]) -> AsyncIterator[None]:
        """While inside, these are given the target: a share of the requests waits for them, as for the others.

        Otherwise the one that is ready first would take all. That ends as long after the first one was ready as it had
        taken (see `_confirm`).
        """
        for server in servers:
            server.loads = True
        try:
            yield
        finally:
            for server in servers:
                server.loads = False
            self._dispatch()

    def _stop_waiting(self, target: Target) -> None:
        """No request waits for a server any more that still loads this target."""
        if target == self.target:
            for server in self.servers:
                server.loads = False
            self._dispatch()

    async def adopt(self, version: int, key: str, urls: Container[str]) -> list[str]:
        """Make `version`, sent by the trainer to `urls`, the target. Returns those that confirm it; evicts others."""
        target = Target(version, key)
        self._set_target(target)
        async with self._about_to_generate([server for server in self.servers if server.url in urls]):
            return await self.each(partial(self._confirm, given=target), urls)

    async def each(self, ask: Callable[[Server], Awaitable[T]], urls: Container[str] | None = None) -> list[T]:
        """The answers of all healthy servers (of `urls`) that are not held, asked at once. Evicts those that fail."""
        servers = [s for s in self.servers if s.healthy and not s.held and (urls is None or s.url in urls)]
        outcomes = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerDown):
                self._evict(server, outcome)
        for outcome in outcomes:  # only after all failed servers are evicted
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDown):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _load(self, server: Server) -> float:
        """Have one server load the target and confirm it, unless it has just done so; returns the seconds this took."""
        started, server.older = time.perf_counter(), False
        async with server.loading:  # one that is evicted meanwhile is asked by `_admit`, too
            if not server.current:
                await self._load_target(server)
        return time.perf_counter() - started

    async def _load_target(self, server: Server) -> None:
        target, pause = self.target, self._loading.pause
        assert target is not None
        if self._loading.drains:
            await self._drained(server)
        try:
            async with self._stopped(server, pause) if pause else nullcontext():
                await server.load_weights(target, self._loading.flags)
        except BadRequest as error:
            if self._external and target.uri and "://" not in target.uri:
                raise BadRequest(folder_not_visible(str(error), target.uri)) from error
            raise
        await self._confirm(server, target)

    async def _confirm(self, server: Server, given: Target) -> str:
        """Have the server generate if it holds what it was given, still the target. Returns its address."""
        if (held := await server.ask_version()) != str(given.version):
            raise ServerDown(f"{server.url} holds weights {held} after it was sent {given.version}")
        if given != self.target:
            raise ServerDown(f"{server.url} has loaded {given}, but the target is now {self.target}")
        server.current, server.loads = True, False
        seconds = max(SLOWER_SECONDS, self.clock() - self._target_since)
        asyncio.get_running_loop().call_later(seconds, self._stop_waiting, given)
        self._dispatch()
        return server.url

    async def _catch_up(self, server: Server) -> None:
        """Have the server load the target, unless it holds that already or only the trainer can send it."""
        if (target := self.target) is None:  # the managing client tells which weights it holds
            return
        await server.ask_version()
        if server.held:
            return
        if server.version != target.version:
            server.current = False
        if not server.current and target.uri is not None:
            await self._load(server)

    async def checksums(self) -> dict[str, list[dict[str, str]]]:
        """For each SGLang server, by its address, and each of its GPUs: a checksum of each tensor, by its name."""
        found = await self._check_weights("checksum")
        return {url: [rank["checksums"] for rank in answer["ranks"]] for url, answer in found.items()}

    async def overwrite_weights(self) -> None:
        """Fill the tensors of SGLang servers, which must be paused, with random numbers; then give them weights."""
        self._forget_versions()
        await self._check_weights("reset_tensors")

    async def _check_weights(self, action: str) -> dict[str, Any]:
        """The answer of each healthy server to `/weights_checker`, by its address. A server that fails is evicted."""

        async def ask(server: Server) -> tuple[str, Any]:
            return server.url, await server.ask("/weights_checker", {"action": action})

        return dict(await self.each(ask))

    async def release_caches(self, released: bool) -> None:
        """Have the servers release their KV caches, without which they do not generate, or allocate them again."""
        self._released = released
        await self.each(lambda server: server.release_cache(released, resumes=not self.paused))

    @asynccontextmanager
    async def _stopped(self, server: Server, mode: str) -> AsyncIterator[None]:
        """While inside, the server's generation is paused in `mode`."""
        async with server.commands:
            await server.pause(mode)
            try:
                yield
            finally:
                if not self.paused:
                    await server.resume()

    async def interrupt(self) -> None:
        """Prepare all servers for weights from the trainer; call `resume` afterwards."""
        self._forget_versions()
        await self.followers.acknowledged()
        if self._receiving.drains:
            draining = (server for server in self.servers if not server.held)
            await asyncio.gather(*(self._drained(server) for server in draining))
        if self._receiving.pause:
            await self.pause(self._receiving.pause)

    async def pause(self, mode: str = "abort") -> None:
        """Pause generation on all servers; interrupted requests continue after `resume()`."""
        self.paused = True
        await self.each(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """Continue generation; evicted servers do so before they are admitted."""
        while any(server.healthy and server.paused for server in self.servers):  # others may be admitted meanwhile
            await self.each(Server.resume)
        self.paused = False
