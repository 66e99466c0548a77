"""KV caches that servers release. What SGLang does not guard against ends the stand-ins as it ends SGLang."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from areal_tasks.engines import server_pool
from areal_tasks.engines.server import BadRequest
from tests.inference.fake_server import Fake, check, requests, run, serving, until


class Releasing(Fake):
    """Generates a token for each health check, in `token_seconds`; dies of what SGLang dies of."""

    def __init__(self, token_seconds: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.token_seconds = token_seconds
        self.cache_released = False
        self.generating = 0
        self.orders: list[str] = []
        self.looked: list[str] = []
        self.died_of: list[str] = []
        self.refuses = False

    def must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.died_of.append(otherwise)
            self.deaf = True

    async def token(self, seconds: float) -> None:
        self.generating += 1
        self.must(not self.cache_released, "it generated into memory that is not there")
        await asyncio.sleep(seconds)  # as a server takes its time
        self.must(not self.cache_released, "it generated into memory that is not there")
        self.generating -= 1

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await self.token(0.0)
        return await super().generate(request)

    async def health(self, request: web.Request) -> web.Response:
        """SGLang's answer for both paths. A token of its own while it generates anyhow does no harm here."""
        self.looked.append(request.path)
        await self.token(self.token_seconds)
        return await super().health(request)

    async def command(self, request: web.Request) -> web.Response:
        if request.path.endswith("_memory_occupation"):
            order = request.path.split("_")[0]
            self.orders.append(order)
            if self.broken:
                return web.json_response({"error": "out of order"}, status=500)
            if self.refuses:
                return web.json_response({"error": "no"}, status=400)
            self.must(not self.generating, "it was to release its cache while it generated")
            self.must(self.cache_released == (order == "/resume"), "it had done so before")
            self.cache_released = not self.cache_released
        return await super().command(request)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are looked at many times within a test."""
    monkeypatch.setattr(server_pool, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))


def test_a_server_that_lends_its_memory_is_not_made_to_generate() -> None:
    """Not by the watch over its requests, nor by who asks how it gets on while it is at an order."""

    async def test() -> None:
        fake = Releasing(delay=0.02)
        async with serving(fake) as client:
            await client.update_weights("w", 0)
            check(requests(1), await client.generate(requests(1)))
            await client.release_caches(True)
            await asyncio.sleep(0.2)  # four health checks
            assert {
                heartbeat.progress is not None for heartbeat in (await client.heartbeats(everyone=True)).values()
            } == {True}
            await client.update_weights("w", 0)
            await client.release_caches(False)
            check(requests(1), await client.generate(requests(1)))
        assert fake.died_of == [] and fake.orders == ["/release", "/resume"]

    run(test)


def test_a_look_that_is_under_way_ends_before_the_memory_is_lent() -> None:
    async def test() -> None:
        fake = Releasing(token_seconds=0.15, delay=0.1)
        async with serving(fake) as client:
            await client.update_weights("w", 0)
            check(requests(1), await client.generate(requests(1)))
            assert fake.generating, "the health check that began while it generated continues"
            await client.release_caches(True)
        assert fake.died_of == [] and fake.cache_released

    run(test)


def test_an_order_is_given_once_to_each_server() -> None:
    async def test() -> None:
        old, new = Releasing(), Releasing()
        async with serving(old, new) as client:
            client.servers[0].cache_released = old.cache_released = True  # by the order of another client
            for _ in range(2):
                await client.release_caches(True)
            for _ in range(2):
                await client.release_caches(False)
        assert (old.orders, new.orders) == (["/resume"], ["/release", "/resume"])
        assert old.died_of == new.died_of == []

    run(test)


@pytest.mark.parametrize("released", [True, False])
def test_an_evicted_server_does_as_the_others_before_it_is_let_in_again(released: bool) -> None:
    async def test() -> None:
        ill, well = Releasing(), Releasing()
        async with serving(ill, well) as client:
            if not released:
                await client.release_caches(True)
            ill.broken = True
            assert len(await client.update_weights("w", 1)) == 1
            assert not client.servers[0].healthy
            await client.release_caches(released)
            ill.broken = False
            await until(lambda: client.servers[0].healthy or bool(ill.died_of))
            assert (ill.cache_released, well.cache_released, ill.version) == (released, released, 1)
        assert ill.died_of == well.died_of == []

    run(test)


def test_a_server_that_is_down_is_evicted_though_another_refuses() -> None:
    async def test() -> None:
        refusing, dead = Releasing(), Releasing()
        refusing.refuses = dead.broken = True
        async with serving(refusing, dead) as client:
            with pytest.raises(BadRequest):
                await client.release_caches(True)
            assert [server.healthy for server in client.servers] == [True, False]

    run(test)
