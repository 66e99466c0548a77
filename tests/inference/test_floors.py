"""Several clients of the same servers: one gives them weights, the others generate, on weights not below a floor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, InferenceClient, Lost
from areal_tasks.engines.routing import choose
from areal_tasks.engines.server import Server
from areal_tasks.engines.sharing import Serving, SharedServer
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Fake, Told, check, requests, run, serve, serving, until


def floored(groups: int, floor: int) -> list[GenerateRequest]:
    return [replace(request, floor=floor) for request in requests(groups)]


def held(fakes: Iterable[Fake]) -> Serving:
    """What the managing client tells the others: each server may generate with the weights that it holds."""
    servers = (SharedServer(url=fake.url, start=0, version=fake.version, may_generate=True) for fake in fakes)
    return Serving(servers=tuple(servers), versions_unknown=False, requests=64)


@asynccontextmanager
async def follower(fakes: Sequence[Fake], **changes: Any) -> AsyncIterator[InferenceClient]:
    """A client that only generates, as one in another process. Servers that nothing serves yet are served meanwhile."""
    runners = [await serve(fake) for fake in fakes if not fake.url]
    client = InferenceClient([], Access("token"), Inference(**changes))
    client.clock = asyncio.get_running_loop().time
    await client.follow(held(fakes))
    try:
        yield client
    finally:
        await client.close()
        for runner in runners:
            await runner.cleanup()


def test_requests_pass_over_servers_below_the_floor() -> None:
    servers = [Server("old", 4, version=1), Server("new", 4, version=2), Server("unknown", 4)]
    assert choose(servers, 2) is servers[1]
    assert choose(servers, 3) is None
    assert choose(servers, 1) is servers[0] and choose(servers[2:], 1) is None
    assert choose(servers[2:]) is servers[2]


@pytest.mark.parametrize("newer", [False, True])
def test_a_request_that_begins_again_is_lost_with_its_server_where_others_have_newer_weights(newer: bool) -> None:
    """Its floor may then be higher; else it goes to another server as any other request."""

    async def test() -> None:
        dying, other = Fake(version=1), Fake(version=2 if newer else 1)
        dying.deaf_to_prompts = True
        async with follower([dying, other]) as client:
            asked = [replace(request, begins_again=True, floor=1) for request in requests(2)]
            answers = [asyncio.ensure_future(client.generate(asked[at : at + 2])) for at in (0, 2)]
            outcomes = await asyncio.gather(*answers, return_exceptions=True)
            assert [isinstance(one, Lost) for one in outcomes] == [newer, False]

    run(test)


def test_a_request_waits_for_its_floor_and_holds_no_other_up() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            await client.update_weights("zero", 0)
            late = asyncio.ensure_future(client.generate(floored(2, 1)))
            early = asyncio.ensure_future(client.generate(requests(2)))
            check(requests(2), await early)
            assert not late.done() and all(body["input_ids"] for body in fake.bodies)
            await client.update_weights("one", 1)
            check(requests(2), await late, version=1)

    run(test)


def test_requests_that_wait_for_their_floor_cost_no_search_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """While servers with older weights have room, hundreds may wait, and each request that ends looks for others."""

    async def test() -> None:
        fakes, searches = [Fake(), Fake()], list[int]()

        def search(servers: Iterable[Server], floor: int = 0, *request: float) -> Server | None:
            searches.append(floor)
            return choose(servers, floor)

        async with serving(*fakes) as client:
            await client.update_weights("zero", 0)
            late = asyncio.ensure_future(client.generate(floored(50, 2) + floored(50, 1)))
            await until(lambda: len(client._waiting) == 100)
            monkeypatch.setattr("areal_tasks.engines.server_pool.choose", search)
            client._dispatch()
            assert len(searches) == 2 and len(client._waiting) == 100
            await client.update_weights("two", 2)
            assert {version for result in await late for version in result.versions} == {2}

    run(test)


class Late(Fake):
    """Takes its time to load weights, and to generate."""

    def __init__(self, seconds: float) -> None:
        super().__init__(delay=0.2)
        self.seconds = seconds

    async def update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.seconds)  # as a server takes its time
        return await super().update(request)


@pytest.mark.parametrize(("later", "shares"), [(0.3, [20, 20]), (30.0, [40, 0])])
def test_the_server_that_is_ready_first_leaves_others_their_share_for_a_while(later: float, shares: list[int]) -> None:
    """As with η = 0: a worker asks for a whole batch before any server has the weights."""

    async def test() -> None:
        fakes = [Late(0.2), Late(0.2 + later)]
        async with serving(*fakes) as leader, follower(fakes) as client:
            leader.followers.parts.append(Told(leader, client))
            await leader.update_weights("zero", 0)
            publication = asyncio.ensure_future(leader.update_weights("one", 1))
            await until(lambda: not any(server.may_generate for server in client.servers))
            check(requests(20), await client.generate(floored(20, 1)), version=1)
            assert [fake.samples for fake in fakes] == shares
            await publication

    run(test)


def test_weights_that_another_client_gives_end_the_wait() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        async with serving(*fakes) as leader, follower(fakes) as client:
            leader.followers.parts.append(Told(leader, client))
            check(requests(4), await client.generate(requests(4)))
            work = asyncio.ensure_future(client.generate(floored(4, 3)))
            await until(lambda: len(client._waiting) == 4)
            await leader.update_weights("three", 3)
            check(requests(4), await work, version=3)
            await client.generate(floored(4, 3))
            assert client.version == 3 and client.healthy() == [fake.url for fake in fakes]

    run(test)


def test_retries_and_continuations_have_the_floor_too() -> None:
    """The server that is new enough interrupts the request, then fails; the other gets it when it has caught up."""

    async def test() -> None:
        old, new = Fake(version=1), Fake(version=2)
        new.interrupt = 1
        async with follower([old, new]) as client:
            answer = new.generate

            async def then_broken(request: web.Request) -> web.StreamResponse:
                found = await answer(request)
                new.broken = True
                return found

            new.on_generate = then_broken
            work = asyncio.ensure_future(client.generate(floored(1, 2)))
            await until(lambda: bool(client._waiting))
            assert old.bodies == [] and len(new.bodies) == 2
            old.version = 2
            await client.follow(held([old, new]))
            [first, second] = await work
            assert first.versions == second.versions == [2] * 3 and first.server == old.url

    run(test)


def test_a_server_that_has_gone_back_is_not_believed() -> None:
    """It was started again on older weights, and this client does not know: it is evicted for their tokens."""

    async def test() -> None:
        fake = Fake(version=5)
        async with follower([fake]) as client:
            check(requests(2), await client.generate(requests(2)), version=5)
            fake.version = 4
            work = asyncio.ensure_future(client.generate(floored(2, 5)))
            await until(lambda: not client.servers[0].healthy)
            assert not work.done()
            fake.version = 5
            check(requests(2), await work, version=5)

    run(test)


def test_a_client_that_only_generates_never_asks_for_a_token_by_a_health_check() -> None:
    """A server may have released its cache for the trainer, by the order of another client: a token would end it."""

    async def test() -> None:
        fake = Fake(delay=70.0)  # more than three polls
        fake.broken_health = True
        async with follower([fake]) as client:
            check(requests(1), await client.generate(requests(1)))
            assert [
                heartbeat.progress is not None for heartbeat in (await client.heartbeats(everyone=True)).values()
            ] == [True]
            assert client.healthy() == [fake.url]

    run(test)


@settings(max_examples=30, deadline=None)
@given(
    versions=st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=3),
    floors=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    aborts=st.integers(0, 6),
)
def test_no_token_is_of_weights_below_the_floor(versions: list[list[int]], floors: list[int], aborts: int) -> None:
    """Whatever the servers hold when, and however often they interrupt; all requests end."""

    async def test() -> None:
        fakes = [Fake(delay=0.3) for _ in versions]
        async with serving(*fakes), follower(fakes, groups_per_request=2) as client:
            for fake in fakes:
                fake.interrupt = aborts
            asked = [GenerateRequest([7], 3, group=i, floor=floor) for i, floor in enumerate(floors)]
            work = [asyncio.ensure_future(client.generate([request])) for request in asked]

            async def update(fake: Fake, steps: list[int]) -> None:
                for step in [*steps, 4]:  # at least the highest floor in the end
                    await asyncio.sleep(0.4)  # as training takes its time
                    fake.version += step
                    await client.follow(held(fakes))

            await asyncio.gather(*map(update, fakes, versions))
            results = [result for [result] in await asyncio.gather(*work)]
            for request, result in zip(asked, results, strict=True):
                assert result.output_ids == [1, 2, 3] and min(result.versions) >= request.floor

    run(test)


@pytest.mark.parametrize("groups", [1, 4])
def test_requests_of_different_floors_share_no_http_request(groups: int) -> None:
    async def test() -> None:
        fake = Fake(version=2)
        async with follower([fake], groups_per_request=8) as client:
            await asyncio.gather(client.generate(floored(groups, 1)), client.generate(floored(groups, 2)))
            assert [len(body["input_ids"]) for body in fake.bodies] == [2 * groups] * 2

    run(test)
