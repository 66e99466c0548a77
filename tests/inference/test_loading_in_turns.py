"""New weights through the store: with requests in flight, half of the servers load while the others generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from areal_tasks.engines import server_pool
from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.server import BadRequest, Server
from schemas.recipe.derived import Interruption
from tests.inference.fake_server import Fake, check, requests, run, serving

MODES = ["in_place", "abort", "drain"]


class Loads:
    """How many servers load now, and how many did at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def one(self, seconds: float) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(seconds)  # as a server takes its time
        self.now -= 1


class Slow(Fake):
    """Takes its time to load."""

    def __init__(self, loads: Loads, seconds: float = 1.0) -> None:
        super().__init__()
        self.loads, self.seconds = loads, seconds

    async def update(self, request: web.Request) -> web.Response:
        asked = len(self.bodies)
        await self.loads.one(self.seconds)
        assert len(self.bodies) == asked, "it loads, and is asked to generate"
        return await super().update(request)

    async def fetch(self, request: web.Request) -> web.Response:
        await self.loads.one(self.seconds)
        return await super().fetch(request)


def slow(n: int) -> tuple[list[Slow], Loads]:
    loads = Loads()
    return [Slow(loads) for _ in range(n)], loads


def floored(groups: int, floor: int) -> list[GenerateRequest]:
    return [replace(request, floor=floor) for request in requests(groups)]


def older(client: InferenceClient) -> list[Server]:
    return [server for server in client.servers if server.older]


async def fail(client: InferenceClient, server: Server) -> None:
    await client.evict({server.url: "it was seen to fail"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "half"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_at_most_half_load_at_a_time(n: int, half: int, mode: Interruption) -> None:
    async def test() -> None:
        fakes, loads = slow(n)
        async with serving(*fakes, interruption=mode) as client:
            await client.update_weights("first", 0)
            for version in (1, 2):
                loads.most = 0
                assert len(await client.update_weights(f"w{version}", version)) == n
                assert loads.most == half
                assert all(server.current and not server.older for server in client.servers)
            assert [fake.version for fake in fakes] == [2] * n

    run(test)


def test_all_load_at_once_where_nothing_generates() -> None:
    async def test() -> None:
        fakes, loads = slow(4)
        async with serving(*fakes) as client:
            await client.update_weights("zero", 0)
            update = asyncio.ensure_future(client.update_weights("one", 1))
            await until(lambda: loads.now == 4)
            assert not any(server.may_generate for server in client.servers)
            await update

    run(test)


@pytest.mark.parametrize("mode", MODES)
def test_the_others_generate_meanwhile(mode: Interruption) -> None:
    """A group that begins while no server has the new weights begins on older ones; others wait for its floor."""

    async def test() -> None:
        fakes, loads = slow(2)
        async with serving(*fakes, interruption=mode) as client:
            await client.update_weights("zero", 0)
            update = asyncio.ensure_future(client.update_weights("one", 1))
            await until(lambda: loads.now == 1)
            assert client.version == 0
            late = asyncio.ensure_future(client.generate(floored(2, 1)))
            results = await client.generate(requests(4))
            check(requests(4), results)
            [waits] = older(client)
            assert {result.server for result in results} == {waits.url} and not late.done()
            check(requests(2), await late, version=1)
            assert client.version == 1 and not update.done() and loads.now == 1
            await update
            assert [fake.version for fake in fakes] == [1, 1]

    run(test)


def test_followers_know_before_a_server_loads() -> None:
    async def test() -> None:
        fakes, loads = slow(2)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)
            known: list[tuple[int, set[str]]] = []

            async def acknowledged() -> None:
                known.append((loads.now, {one.url for one in client.serving.servers if one.may_generate}))

            client.followers.acknowledged = acknowledged  # type: ignore[method-assign]
            await client.update_weights("one", 1)
            first, second = [fake.url for fake in fakes]
            assert known == [(0, {second}), (0, {first})]

    run(test)


def test_sglang_fetches_in_turns_too_and_generates_meanwhile() -> None:
    async def test() -> None:
        fakes, loads = slow(2)
        async with serving(*fakes, interruption="in_place", engine="sglang") as client:
            await client.update_weights("s3://b/zero", 0)
            loads.most = 0
            update = asyncio.ensure_future(client.update_weights("s3://b/one", 1))
            await until(lambda: loads.now == 1)
            results = await client.generate(requests(4))
            assert {result.server for result in results} == {fake.url for fake in fakes}
            await update
            assert loads.most == 1 and all(fake.fetches == fake.updates for fake in fakes)

    run(test)


# ── servers that fail, are held, or were away ─────────────────────────────────────────────────────────────────────────


def test_a_server_that_fails_gives_its_turn_to_others_and_loads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))

    async def test() -> None:
        fakes, _ = slow(3)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)
            fakes[0].broken = True
            assert len(await client.update_weights("one", 1)) == 2
            fakes[0].broken = False
            await until(lambda: all(server.may_generate for server in client.servers))
            assert [fake.version for fake in fakes] == [1] * 3 and not older(client)

    run(test)


def test_one_that_fails_before_its_turn_loads_once() -> None:
    async def test() -> None:
        fakes, loads = slow(2)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)
            update = asyncio.ensure_future(client.update_weights("one", 1))
            await until(lambda: loads.now == 1)
            [waits] = older(client)
            await fail(client, waits)
            assert len(await update) == 1
            await until(lambda: waits.may_generate)
            assert [fake.updates for fake in fakes] == [["zero", "one"]] * 2

    run(test)


def test_one_that_fails_while_it_fetches_loads_once() -> None:
    async def test() -> None:
        fakes, loads = slow(2)
        fakes[0].seconds = 5.0
        async with serving(*fakes, interruption="in_place", engine="sglang") as client:
            await client.update_weights("s3://b/zero", 0)
            update = asyncio.ensure_future(client.update_weights("s3://b/one", 1))
            await until(lambda: loads.now == 1)
            first = client.servers[0]
            await fail(client, first)
            assert len(await update) == 1
            await until(lambda: first.may_generate)
            assert [fake.updates for fake in fakes] == [["s3://b/zero", "s3://b/one"]] * 2

    run(test)


@pytest.mark.parametrize("later", [0.5, 5.0])
def test_one_that_fails_while_followers_are_told_loads_once(later: float) -> None:
    """It may be admitted before they acknowledge."""

    async def test() -> None:
        fakes, told, goes_on = slow(2)[0], asyncio.Event(), asyncio.Event()
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)

            async def acknowledged() -> None:
                told.set()
                await goes_on.wait()

            client.followers.acknowledged = acknowledged  # type: ignore[method-assign]
            update = asyncio.ensure_future(client.update_weights("one", 1))
            await told.wait()
            [first] = set(client.servers) - set(older(client))
            await fail(client, first)
            await asyncio.sleep(later)  # less than a load takes, or more
            goes_on.set()
            await update
            await until(lambda: all(server.may_generate for server in client.servers))
            assert [fake.updates for fake in fakes] == [["zero", "one"]] * 2

    run(test)


def test_one_that_fails_while_it_is_drained_loads_once() -> None:
    async def test() -> None:
        fakes, _ = slow(2)
        for fake in fakes:
            fake.delay = 5.0
        async with serving(*fakes, interruption="drain") as client:
            await client.update_weights("zero", 0)
            work = asyncio.ensure_future(client.generate(requests(4)))
            await until(lambda: all(server.requests for server in client.servers))
            update = asyncio.ensure_future(client.update_weights("one", 1))
            await until(lambda: len(older(client)) == 1)
            [first] = set(client.servers) - set(older(client))
            await fail(client, first)
            await first.drop()
            await asyncio.gather(update, work)
            await until(lambda: all(server.may_generate for server in client.servers))
            assert [fake.updates for fake in fakes] == [["zero", "one"]] * 2

    run(test)


def test_one_that_was_away_skips_to_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))

    async def test() -> None:
        fakes, _ = slow(3)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)
            fakes[2].broken = True
            for version in (1, 2, 3):
                await client.update_weights(f"w{version}", version)
            fakes[2].broken = False
            await until(lambda: all(server.may_generate for server in client.servers))
            assert fakes[2].updates == ["zero", "w3"]

    run(test)


def test_a_held_server_takes_no_part() -> None:
    """Of three, one is held: the other two take turns. One is held only if it has the weights that are wanted."""

    async def test() -> None:
        fakes, loads = slow(3)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("zero", 0)
            server, current = await client.hold("zero")
            loads.most, update = 0, asyncio.ensure_future(client.update_weights("one", 1))
            await until(lambda: loads.now == 1)
            holding = asyncio.ensure_future(client.hold("one"))
            assert current and len(await update) == 2 and loads.most == 1
            other, current = await holding
            assert current and other.version == 1 and not server.may_generate
            for one in (server, other):
                await client.release(one)
            await until(lambda: all(one.may_generate for one in client.servers))
            assert [fake.version for fake in fakes] == [1] * 3

    run(test)


def test_weights_that_are_refused_stop_all() -> None:
    async def test() -> None:
        class Refuses(Fake):
            async def update(self, request: web.Request) -> web.Response:
                if (await request.json())["model_path"] == "bad":
                    return web.json_response({"success": False, "message": "no"}, status=400)
                return await super().update(request)

        async with serving(Refuses(), Refuses(), interruption="in_place") as client:
            await client.update_weights("zero", 0)
            with pytest.raises(BadRequest):
                await client.update_weights("bad", 1)
            await client.forget_versions()
            assert not older(client) and not any(server.may_generate for server in client.servers)

    run(test)


@pytest.mark.parametrize("version", [1, 0])
def test_none_generates_with_another_attempt_or_a_newer_version(version: int) -> None:
    """The trainer was restored: what servers hold is not what the tables say that this version is."""

    async def test() -> None:
        fakes, loads = slow(2)
        async with serving(*fakes, interruption="in_place") as client:
            await client.update_weights("one", 1)
            update = asyncio.ensure_future(client.update_weights("again", version))
            await until(lambda: loads.now == 2)
            assert not older(client) and not any(server.may_generate for server in client.servers)
            await update

    run(test)


# ── whatever happens ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(
    seconds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    pauses=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
)
def test_no_token_is_older_than_its_group_began_on(
    seconds: Sequence[int], pauses: Sequence[int], mode: Interruption
) -> None:
    """Each group begins on the version that the client names; some servers generate whenever others load."""

    async def test() -> None:
        loads = Loads()
        fakes = [Slow(loads, float(one)) for one in seconds]
        async with serving(*fakes, interruption=mode) as client:
            await client.update_weights("zero", 0)
            loads.most, over = 0, False

            async def generate(group: int) -> None:
                while not over:
                    floor = client.version or 0
                    [result] = await client.generate([GenerateRequest([7], 3, group=group, floor=floor)])
                    assert min(result.versions) >= floor
                    await asyncio.sleep(0.5)  # as training takes its time

            work = [asyncio.ensure_future(generate(group)) for group in range(6)]
            for version, pause in enumerate(pauses, 1):
                await asyncio.sleep(pause)  # as training takes its time
                await client.update_weights(f"w{version}", version)
            over = True
            await asyncio.gather(*work)
            assert loads.most <= -(-len(fakes) // 2)
            assert [fake.version for fake in fakes] == [len(pauses)] * len(fakes)

    run(test)
