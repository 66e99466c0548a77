"""A server that is held generates for its holder alone, and gets no weights; the others go on without it."""

from __future__ import annotations

import asyncio
import math

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import Server, Target
from areal_tasks.engines.server_pool import NO_SERVER_SECONDS
from areal_tasks.engines.sharing import Followers
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Fake, check, requests, run, serving, until


class OneFollower(Followers):
    """Another client, as the managing one sees it: what it knows, and its requests in flight."""

    def __init__(self, client: InferenceClient) -> None:
        super().__init__()
        self.client, self.known = client, list[dict[str, bool]]()
        self.requests: dict[str, int] = {}
        self.asked = 0

    async def acknowledged(self) -> None:
        self.known.append({server.url: server.may_generate for server in self.client.serving.servers})

    async def busy(self) -> dict[str, int]:
        self.asked += 1
        return self.requests


def test_it_gets_neither_requests_nor_weights_until_it_is_released() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        async with serving(*fakes) as client:
            client.followers.parts.append(follower := OneFollower(client))
            await client.update_weights("zero", 0)
            server, current = await client.hold("zero")
            held, other = fakes if server.url == fakes[0].url else reversed(fakes)
            assert current and follower.known[-1] == {held.url: False, other.url: True}
            assert len(await client.update_weights("one", 1)) == 1
            check(requests(4), await client.generate(requests(4)), version=1)
            assert (held.version, held.bodies, client.healthy()) == (0, [], [other.url])
            await client.update_weights("two", 2)
            await client.release(server)
            await until(lambda: server.may_generate)
            assert held.updates == ["zero", "two"], "it skips what it has missed"
            check(requests(8), await client.generate(requests(8)), version=2)
            assert held.bodies and client.healthy() == [fake.url for fake in fakes]

    run(test)


def test_what_it_has_under_way_ends_on_it() -> None:
    async def test() -> None:
        fakes = [Fake(delay=1.0), Fake(delay=1.0)]
        async with serving(*fakes) as client:
            await client.update_weights("zero", 0)
            work = asyncio.ensure_future(client.generate(requests(4)))
            await until(lambda: all(fake.bodies for fake in fakes))
            server, _ = await client.hold("zero")
            assert server.requests, "it was not waited for"
            await client.update_weights("one", 1)
            results = await work
            check(requests(4), results)
            assert {result.server for result in results} == {fake.url for fake in fakes}

    run(test)


def test_a_server_that_needs_older_weights_is_left_by_all_first() -> None:
    async def test() -> None:
        fake = Fake(delay=1.0)
        async with serving(fake) as client:
            client.followers.parts.append(follower := OneFollower(client))
            follower.requests = {fake.url: 1}
            await client.update_weights("one", 1)
            work = asyncio.ensure_future(client.generate(requests(2)))
            await until(lambda: bool(fake.bodies))
            holding = asyncio.ensure_future(client.hold("zero"))
            check(requests(2), await work, version=1)
            await until(lambda: follower.asked > 3)
            assert client.held() == [fake.url]
            assert not holding.done(), "another client has a request there"
            follower.requests = {}
            server, current = await holding
            assert not current
            await client.release(server)
            await until(lambda: server.may_generate)
            assert fake.updates == ["one", "one"], "whatever its holder gave it"

    run(test)


def test_new_weights_wait_while_the_only_server_is_held() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            await client.update_weights("zero", 0)
            server, _ = await client.hold("zero")
            giving = asyncio.ensure_future(client.update_weights("one", 1))
            began = client.clock()
            await until(lambda: client.clock() - began > 2 * NO_SERVER_SECONDS)
            assert not giving.done() and fake.version == 0
            await client.release(server)
            await giving
            assert fake.version == 1

    run(test)


def test_a_hold_that_is_given_up_leaves_the_server_in_use() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            client.followers.parts.append(follower := OneFollower(client))
            await client.update_weights("one", 1)
            follower.requests = {fake.url: 1}
            holding = asyncio.ensure_future(client.hold("zero"))
            await until(lambda: client.held() == [fake.url])
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            check(requests(2), await client.generate(requests(2)), version=1)

    run(test)


def test_one_that_is_released_while_the_trainer_sends_weights_gets_none_until_it_has_nothing_under_way() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        async with serving(*fakes, interruption="drain") as client:
            client.followers.parts.append(follower := OneFollower(client))
            await client.update_weights("zero", 0)
            server, current = await client.hold("zero")
            [other] = client.healthy()
            assert current, "others may have requests on it"
            follower.requests = {server.url: 1, other: 1}
            interrupting = asyncio.ensure_future(client.interrupt())
            await until(lambda: follower.asked > 2)
            releasing = asyncio.ensure_future(client.release(server))
            follower.requests = {server.url: 1}
            await interrupting
            assert await client.wait_healthy() == [other], "weights are sent to these"
            follower.requests = {}
            await releasing
            assert client.healthy() == [fake.url for fake in fakes]

    run(test)


def test_its_holder_takes_no_other_weights_from_it() -> None:
    """Whatever the server is thought to have: it is asked, and given the weights if need be."""

    async def test() -> None:
        fakes = [Fake(version=1), Fake(version=2)]
        async with serving(*fakes):
            for fake, updates in zip(fakes, ([], ["one"]), strict=True):
                own = InferenceClient([], Access("token"), Inference(), math.inf)
                await own.holding(Target(1, "one", "one"))
                await own.sync({fake.url: 0}, [fake.url])
                check(requests(2), await own.generate(requests(2)), version=1)
                assert fake.updates == updates
                await own.close()

    run(test)


def test_states() -> None:
    assert Server("url", 1, held=True, current=False).waits_for == "release"
    assert Server("url", 1, held=True, healthy=False).waits_for == "answers"
    assert not Server("url", 1, held=True).may_generate
