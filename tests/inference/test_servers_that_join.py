"""Servers that leave and join while others generate: nothing waits for them, and what had finished is not repeated."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from test_damaged_weights import VERSION, weights
from waiting import wait_until

from areal_tasks.engines import server_pool
from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.handover import name_of
from areal_tasks.engines.server import ServerDown, Target
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Publish, Send, Sent, Written
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.launchers.supervisor import Ready, ServiceFailed
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import upload
from areal_tasks.store.opening import open_run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.load import load_recipe
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Fake, check, requests, run, serve, until
from tests.inference.fake_supervisor import FakeSupervisor, supervise


@asynccontextmanager
async def supervised(*fakes: Fake) -> AsyncIterator[InferenceClient]:
    """A client whose servers another process restarts; it has none at first, and wants version 0."""
    runners = [await serve(fake) for fake in fakes]
    client = InferenceClient([], Access("token"), Inference(), math.inf)
    await client.holding(Target(0, "zero"))
    try:
        yield client
    finally:
        await client.close()
        for runner in runners:
            await runner.cleanup()


def starts(*fakes: Fake) -> dict[str, int]:
    return {fake.url: 0 for fake in fakes}


def test_what_a_server_has_under_way_that_is_gone_is_repeated_and_nothing_else() -> None:
    async def test() -> None:
        going, staying = Fake(delay=1000), Fake()
        async with supervised(going, staying) as client:
            await client.sync(starts(going, staying), [going.url, staying.url])
            await until(lambda: len(client.healthy()) == 2)
            asked = requests(8)
            work = asyncio.ensure_future(client.generate(asked))
            await until(lambda: len(going.bodies) == 4 and sum(server.done for server in client.servers) == 8)
            await client.sync(starts(staying), [staying.url])
            results = await work
            check(asked, results)
            assert {result.server for result in results} == {staying.url} and len(staying.bodies) == 8
            sent = [body["sampling_params"][0]["sampling_seed"] for body in staying.bodies]
            assert len(set(sent)) == 8, "nothing that had finished was asked for again"

    run(test)


def test_requests_wait_while_every_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "NO_SERVER_SECONDS", 0.01)

    async def test() -> None:
        first, second = Fake(delay=1000), Fake()
        async with supervised(first, second) as client:
            await client.sync(starts(first), [first.url])
            asked = requests(3)
            work = asyncio.ensure_future(client.generate(asked))
            await until(lambda: len(first.bodies) == 3)
            await client.sync({}, [])
            assert not work.done()
            await client.sync(starts(second), [second.url])
            check(asked, await work)

    run(test)


def test_a_server_that_joins_loads_what_it_lacks_while_the_other_generates() -> None:
    async def test() -> None:
        there, joins = Fake(version=5), Fake(version=3)
        async with supervised(there, joins) as client:
            await client.sync(starts(there), [there.url])
            await client.update_weights("five", 5)
            loads = asyncio.Event()

            async def held_up(request: web.Request) -> web.Response:
                await loads.wait()
                return await Fake.update(joins, request)

            joins.on_update = held_up
            await client.sync(starts(there, joins), [there.url])
            asked = requests(4)
            check(asked, await client.generate(asked), version=5)
            assert len(there.bodies) == 4 and not joins.bodies and there.updates == ["five"]
            loads.set()
            await until(lambda: len(client.healthy()) == 2)
            assert (joins.version, joins.updates) == (5, ["five"])
            check(asked, await client.generate(asked), version=5)
            assert len(joins.bodies) == 2

    run(test)


def test_a_server_with_other_weights_generates_nothing_until_it_is_handed_those_in_force() -> None:
    async def test() -> None:
        there, joins = Fake(), Fake(version=7)
        async with supervised(there, joins) as client:
            await client.sync(starts(there, joins), [there.url])
            await until(lambda: len(client.healthy()) == 2)
            asked = requests(4)
            check(asked, await client.generate(asked))
            assert not joins.bodies and not client.stuck
            there.version = joins.version = 1
            await client.adopt(1, "one", [there.url, joins.url])
            check(asked, await client.generate(asked), version=1)
            assert len(joins.bodies) == 2

    run(test)


def test_or_until_those_in_force_are_written_somewhere() -> None:
    async def test() -> None:
        there, joins = Fake(), Fake(version=7)
        async with supervised(there, joins) as client:
            await client.sync(starts(there, joins), [there.url])
            await until(lambda: len(client.healthy()) == 2)
            await client.holding(Target(0, "written now", "zero"))
            await until(lambda: all(server.may_generate for server in client.servers))
            assert (there.updates, joins.updates) == ([], ["zero"])

    run(test)


def test_a_server_that_comes_and_goes_is_told_of_once_and_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It seems well, and fails at every request."""
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.001, 0.002))

    async def test() -> None:
        ill, well = Fake(), Fake()
        ill.deaf_to_prompts = True
        async with supervised(ill, well) as client:
            now = 100.0
            client.clock = lambda: now
            await client.sync(starts(ill, well), [ill.url, well.url])
            for _ in range(6):
                await until(lambda: len(client.healthy()) == 2)
                check(requests(4), await client.generate(requests(4)))
                now += 5.0
            [server] = [server for server in client.servers if server.url == ill.url]
            await until(lambda: server.healthy)
            assert client.lost() == [] and server.failures == 6
            await client.evict({ill.url: "once more"})
            assert client.lost() == [ill.url]
            assert len([m for m in caplog.messages if m.startswith("evicted")]) == 1
            await until(lambda: server.healthy)
            now += 2 * server_pool.LOST_SECONDS
            await client.evict({ill.url: "it was well for long"})
            assert client.lost() == [] and server.failures == 1

    with caplog.at_level(logging.INFO, server_pool.__name__):
        run(test)
    assert len([m for m in caplog.messages if m.startswith("evicted")]) == 2
    assert len([m for m in caplog.messages if "is admitted" in m]) <= 4, caplog.messages


def test_a_server_that_was_not_sent_the_weights_is_not_taken_to_hold_them() -> None:
    """It was let in while the trainer sent them to the others, and has the same number from before."""

    async def test() -> None:
        sent, other = Fake(version=1), Fake(version=1)
        async with supervised(sent, other) as client:
            await client.sync(starts(sent, other), [])
            await until(lambda: len(client.healthy()) == 2)
            assert await client.adopt(1, "one", [sent.url]) == [sent.url]
            assert [server.url for server in client.servers if server.current] == [sent.url]

    run(test)


class Pausing(Fake):
    """Notes its orders. While it is paused it shows no health, as SGLang, which would generate a token for it."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[str] = []
        self.goes_on: Callable[[], object] = lambda: True  # when

    async def command(self, request: web.Request) -> web.Response:
        if request.path == "/continue_generation":
            await until(self.goes_on)
        self.orders.append(request.path)
        self.broken_health = request.path == "/pause_generation"
        return await super().command(request)


def test_a_server_that_was_evicted_while_it_was_paused_goes_on_before_it_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.001, 0.002))

    async def test() -> None:
        ill, well = Pausing(), Pausing()
        async with supervised(ill, well) as client:
            await client.sync(starts(ill, well), [ill.url, well.url])
            await until(lambda: len(client.healthy()) == 2)
            await client.pause()
            await client.evict({ill.url: "its answer was lost"})
            await client.resume()
            await until(lambda: len(client.healthy()) == 2)
            await client.evict({ill.url: "its answer was lost once more"})
            await until(lambda: len(client.healthy()) == 2)
            assert ill.orders == well.orders == ["/pause_generation", "/continue_generation"]

    run(test)


def test_a_server_that_is_let_in_while_all_are_told_to_go_on_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.001, 0.002))

    async def test() -> None:
        ill, well = Pausing(), Pausing()
        async with supervised(ill, well) as client:
            await client.sync(starts(ill, well), [ill.url, well.url])
            await until(lambda: len(client.healthy()) == 2)
            await client.pause()
            await client.evict({ill.url: "its answer was lost"})
            well.goes_on = lambda: len(client.healthy()) == 2
            await client.resume()
            assert ill.orders == well.orders == ["/pause_generation", "/continue_generation"]

    run(test)


def test_servers_of_others_are_told_to_go_on_once() -> None:
    """A run that ended before may have left them paused."""

    async def test() -> None:
        fake = Pausing()
        async with supervised(fake) as client:
            await client.use_external([fake.url])
            await until(lambda: len(client.healthy()) == 1)
            await client.evict({fake.url: "its answer was lost"})
            await until(lambda: len(client.healthy()) == 1)
            assert fake.orders == ["/continue_generation"]

    run(test)


# ── through the engines ─────────────────────────────────────────────────────────────────────────────────────────────


class Restarting(FakeSupervisor):
    """Servers that end, and are restarted when the flow polls them, on the weights that are named then."""

    def __init__(self, engines: Engines, fakes: list[Fake]) -> None:
        super().__init__()
        self.call = engines.servers.call
        self.fakes, self.dead = fakes, set[int]()
        self.pauses = False  # before it starts one again
        self.started_on: list[WeightsRef | None] = []
        for index in range(len(fakes)):
            self._start(index, engines.servers.written)

    def _start(self, index: int, weights: WeightsRef | None) -> None:
        fake = self.fakes[index] = Fake(version=weights.version if weights else 0)
        self.call(serve(fake))
        one = Ready(fake.url, len(self.started_on), weights)
        self.running = [*self.running[:index], one, *self.running[index + 1 :]]
        self.started_on.append(weights)

    def ended(self, names: Any) -> frozenset[tuple[str, int]]:
        return frozenset((str(index), self.running[index].restart) for index in self.dead)

    def poll(self, names: Any, weights: WeightsRef | None = None) -> list[Ready]:
        if list(names) == ["trainer"]:
            return []
        while self.dead and not self.pauses:
            self._start(self.dead.pop(), weights)
        return super().poll(names)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Engines with two servers that are handed their weights; version 3 is in the store."""
    recipe = load_recipe("gsm8k", ["inference.servers=2"])
    found_run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(found_run, recipe, tmp_path / "logs") as found:
        found.initial = found.servers.serving = found.servers.written = weights(found_run, tmp_path / "model")
        supervise(found, Restarting(found, [Fake(), Fake()]))
        found.servers.transport = "nccl"
        yield found


def supervisor(engines: Engines) -> Restarting:
    found = engines.supervisor
    assert isinstance(found, Restarting)
    return found


def hand_over(engines: Engines, version: int) -> None:
    """The trainer gives both servers a version that is not in the store."""

    def send(command: Send) -> Sent:
        for fake in supervisor(engines).fakes:
            fake.version = command.version
        return Sent()

    trainer: Any = SimpleNamespace(run=lambda command, _answer: send(command))
    engines.servers.serve(unwritten(version), trainer)
    assert engines.servers.inference().version == version


def unwritten(version: int) -> WeightsRef:
    return WeightsRef(version=version, attempt="", path="", sha256="", digest=f"what made {version}")


def holds_nine(engines: Engines, folder: Path) -> None:
    """The trainer holds version 9, has nothing to do, and writes it when it is asked."""
    (folder / "nine").mkdir()
    (folder / "nine" / "model.safetensors").write_bytes(b"nine")

    def publish(command: Publish) -> Written:
        assert command.version == 9
        return Written(files=upload(engines.run.store, command.prefix, folder / "nine"))

    engines.actor.client = SimpleNamespace(  # type: ignore[assignment]
        is_free=lambda version: version == 9, run=lambda command, _answer: publish(command), close=lambda: None
    )


def ends(engines: Engines, index: int) -> None:
    """A server dies, and a caller that waits for the servers finds out."""
    supervisor(engines).dead.add(index)
    engines.servers._supervise()


def test_servers_start_on_the_weights_in_force_and_are_asked_to_load_nothing(engines: Engines) -> None:
    client = engines.servers.inference()
    ends(engines, 0)
    wait_until(lambda: len(client.healthy()) == 2)
    assert all(server.current for server in client.servers)
    assert [fake.updates for fake in supervisor(engines).fakes] == [[], []]
    assert supervisor(engines).started_on[-1] == engines.servers.serving and client.version == VERSION


def test_weights_that_the_store_does_not_have_are_written_for_a_server_that_starts(
    engines: Engines, tmp_path: Path
) -> None:
    engines.servers.inference()
    hand_over(engines, 9)
    holds_nine(engines, tmp_path)
    ends(engines, 1)
    client = engines.servers.inference()
    wait_until(lambda: len(client.healthy()) == 2)
    started_on, serving = supervisor(engines).started_on[-1], engines.servers.serving
    assert started_on == serving == engines.servers.written and serving is not None and serving.version == 9
    assert all(server.current for server in client.servers) and client.wants(name_of(serving))
    assert [fake.updates for fake in supervisor(engines).fakes] == [[], []], "the other is not disturbed"


def test_a_trainer_that_is_busy_is_left_alone_and_the_server_waits_for_the_next_version(engines: Engines) -> None:
    engines.servers.inference()
    hand_over(engines, 9)
    engines.actor.client = SimpleNamespace(is_free=lambda version: False, close=lambda: None)  # type: ignore[assignment]
    ends(engines, 1)
    client = engines.servers.inference()
    wait_until(lambda: len(client.healthy()) == 2)
    assert supervisor(engines).started_on[-1] == engines.servers.written
    assert [server.current for server in client.servers] == [True, False]
    hand_over(engines, 10)
    assert [server.current for server in client.servers] == [True, True]


@pytest.mark.parametrize("error", [UserError("the trainer refused /publish: No space left"), TrainerDown("no answer")])
def test_a_trainer_that_cannot_write_does_not_disturb_the_servers_that_are_well(
    engines: Engines, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once for each start of a server, not at each poll."""
    client = engines.servers.inference()
    monkeypatch.setattr(client, "_ends", Ends)  # there is no model to ask
    hand_over(engines, 9)
    asked: list[int] = []

    def publish(command: Publish) -> Written:
        asked.append(command.version)
        raise error

    trainer: Any = SimpleNamespace(
        is_free=lambda version: True, run=lambda command, _answer: publish(command), close=lambda: None
    )
    engines.actor.client = trainer
    restarting = supervisor(engines)
    restarting.pauses = True
    for _ in range(3):
        ends(engines, 1)
    assert asked == [9]
    restarting.pauses = False
    ends(engines, 1)
    assert asked == [9] and restarting.started_on[-1] == engines.servers.written
    asked_for = requests(2)
    check(asked_for, engines.servers.call(client.generate(asked_for), generates=client), version=9)
    ends(engines, 1)
    assert asked == [9, 9]


def test_servers_on_older_weights_are_not_taken_to_hold_what_is_written_for_another(
    engines: Engines, tmp_path: Path
) -> None:
    """The run resumes at a version that the store does not have; a server dies before the trainer hands it over."""
    client = engines.servers.inference()
    engines.servers.serving = unwritten(9)
    holds_nine(engines, tmp_path)
    ends(engines, 1)
    wait_until(lambda: all(server.may_generate for server in client.servers))
    assert [fake.version for fake in supervisor(engines).fakes] == [9, 9] and client.version == 9


def test_when_one_starts_again_after_weights_failed_the_others_are_given_some_again(engines: Engines) -> None:
    client = engines.servers.inference()
    engines.servers.loop.run(client.forget_versions())
    ends(engines, 1)
    wait_until(lambda: len(client.healthy()) == 2)
    assert all(server.may_generate for server in engines.servers.inference().servers)


def test_when_all_have_started_again_on_older_weights_the_stage_is_told(engines: Engines) -> None:
    client = engines.servers.inference()
    hand_over(engines, 9)
    engines.actor.client = SimpleNamespace(is_free=lambda version: False, close=lambda: None)  # type: ignore[assignment]
    supervisor(engines).dead |= {0, 1}
    engines.servers._supervise()
    with pytest.raises(ServerDown, match="have to be given the current ones"):
        engines.servers.call(client.generate(requests(1)), generates=client)
    assert client.stuck, "the next to ask has the trainer hand them over"


def test_when_the_last_has_failed_too_often_the_stage_ends_with_its_log(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = engines.servers.inference()
    fakes = supervisor(engines).fakes
    for fake in fakes:
        fake.delay = 1000

    def given_up(*_: Any) -> list[Ready]:
        raise ServiceFailed("service 'inference-0' failed 4 times")

    async def work() -> None:
        generation = asyncio.ensure_future(client.generate(requests(2)))
        await until(lambda: all(fake.bodies for fake in fakes))
        monkeypatch.setattr(engines.supervisor, "poll", given_up)
        await generation

    with pytest.raises(ServiceFailed, match="failed 4 times"):
        engines.servers.call(work(), generates=client)
    wait_until(lambda: not any(server.requests for server in client.servers), "what it asked for is over")
