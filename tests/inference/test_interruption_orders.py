"""What servers are asked, and in which order, when new weights come while they generate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from waiting import LIMIT

from areal_tasks.engines import server_pool
from areal_tasks.engines.client import GenerateResult
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Command, Send, Sent
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from schemas.manifest import WeightsRef
from schemas.recipe.derived import Interruption
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, check, requests, run, serve, serving, until
from tests.inference.fake_supervisor import FakeSupervisor, supervise

PAUSE, UPDATE, CONTINUE = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
KEEP = {"flush_cache": False, "abort_all_requests": False}
RETRACT = {"flush_cache": True, "abort_all_requests": False}
ABORT = {"flush_cache": True, "abort_all_requests": True}


class Ordered(Fake):
    """Notes what it is ordered. It generates nothing before it may `go_on`; an abort ends its first answers early."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[tuple[str, Any]] = []
        self.asked = threading.Event()  # to generate
        self.may_go_on: asyncio.Event | None = None
        self.goes_on = False  # when it is continued
        self.fails = 0  # updates

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.orders.append((request.path, None))
        self.asked.set()
        if self.may_go_on is not None:
            await self.may_go_on.wait()
        return await super().generate(request)

    async def command(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append((request.path, body.get("mode")))
        if body.get("mode") == "abort" and self.may_go_on is not None:
            self.interrupt = 1
            self.may_go_on.set()
        if request.path == CONTINUE and self.goes_on and self.may_go_on is not None:
            self.may_go_on.set()
        return await super().command(request)

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append((request.path, {name: body[name] for name in ABORT}))
        self.fails -= 1
        if self.fails >= 0:
            return web.json_response({"error": "no memory"}, status=500)
        return await super().update(request)


@pytest.mark.parametrize(
    ("mode", "engine", "orders"),
    [
        (None, "embedded", [(UPDATE, ABORT)]),
        (None, "sglang", [(UPDATE, ABORT)]),
        ("in_place", "embedded", [(PAUSE, "in_place"), (UPDATE, KEEP), (CONTINUE, None)]),
        ("abort", "embedded", [(UPDATE, RETRACT)]),
        ("abort", "sglang", [(UPDATE, ABORT)]),
        ("drain", "embedded", [(UPDATE, ABORT)]),
        ("drain", "sglang", [(UPDATE, ABORT)]),
    ],
)
def test_orders_of_an_update(mode: Interruption | None, engine: str, orders: list[Any]) -> None:
    async def test() -> None:
        fake = Ordered()
        async with serving(fake, interruption=mode, engine=engine) as client:
            await client.update_weights("w", 1)
            assert fake.orders == orders
            [flags] = [found for path, found in orders if path == UPDATE]
            assert fake.update_bodies == [{"model_path": "w", "weight_version": "1"} | flags]

    run(test)


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_draining_waits_for_requests_and_holds_new_ones_back(engine: str) -> None:
    async def test() -> None:
        fake = Ordered()
        fake.may_go_on = asyncio.Event()
        async with serving(fake, interruption="drain", engine=engine) as client:
            early = asyncio.ensure_future(client.generate(requests(1)))
            await until(lambda: fake.orders)
            update = asyncio.ensure_future(client.update_weights("w", 1))
            late = asyncio.ensure_future(client.generate(requests(1)))
            await until(lambda: client._waiting)
            fake.may_go_on.set()
            check(requests(1), await early)
            await update
            check(requests(1), await late, version=1)
            assert [path for path, _ in fake.orders] == ["/generate", UPDATE, "/generate"]

    run(test)


def test_a_server_that_fails_while_it_is_paused_is_continued_and_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))

    async def test() -> None:
        fake = Ordered()
        async with serving(fake, interruption="in_place") as client:
            fake.fails = 2
            assert await client.update_weights("w", 1) == []
            check(requests(1), await client.generate(requests(1)), version=1)
            attempt = [(PAUSE, "in_place"), (UPDATE, KEEP), (CONTINUE, None)]
            assert fake.orders == [*attempt * 3, ("/generate", None)]
            assert not client.servers[0].paused

    run(test)


def test_a_server_that_does_not_answer_the_pause_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))

    async def test() -> None:
        fake = Ordered()
        command, lost = Fake.command, [PAUSE]
        async with serving(fake, interruption="in_place") as client:

            async def losing(self: Fake, request: web.Request) -> web.Response:
                answer = await command(self, request)
                if request.path in lost:
                    lost.remove(request.path)
                    assert request.transport is not None
                    request.transport.close()
                return answer

            monkeypatch.setattr(Fake, "command", losing)
            await client.update_weights("w", 1)
            await until(lambda: client.servers[0].healthy)
            attempt = [(PAUSE, "in_place"), (UPDATE, KEEP), (CONTINUE, None)]
            assert fake.orders == [(PAUSE, "in_place"), (CONTINUE, None), *attempt]

    run(test)


def test_tokens_of_all_versions_between_begin_and_end_are_taken_and_no_others() -> None:
    async def test() -> None:
        fake, gate = Ordered(), asyncio.Event()
        fake.may_go_on, answer = gate, fake.answer
        found = [[0, 1], [1, 1], [2, 1]]

        def mixed(*arguments: Any) -> dict[str, Any]:
            whole = answer(*arguments)
            whole["meta_info"] |= {"weight_versions": found, "stale_kv": [[False, 1], [True, 2]]}
            return whole

        fake.answer = mixed  # type: ignore[method-assign]
        async with serving(fake, interruption="in_place") as client:
            work = asyncio.ensure_future(client.generate(requests(1, size=1)))
            await until(lambda: fake.orders)
            for version in (1, 2):
                await client.update_weights("w", version)
            gate.set()
            [result] = await work
            assert (result.versions, result.stale_kv) == ([0, 1, 2], [False, True, True])
            late = asyncio.ensure_future(client.generate(requests(1, size=1)))  # its answer speaks of version 0
            await until(lambda: not client.servers[0].healthy)
            fake.answer = answer  # type: ignore[method-assign]
            [result] = await late
            assert (result.versions, result.stale_kv) == ([2] * 3, [False] * 3)

    run(test)


def test_no_token_is_taken_of_weights_that_turn_out_to_be_damaged() -> None:
    """A request under way on them is repeated, on a server that was given others."""

    async def test() -> None:
        fake, gate = Ordered(), asyncio.Event()
        fake.may_go_on = gate
        async with serving(fake, interruption="in_place") as client:
            work = asyncio.ensure_future(client.generate(requests(1)))
            await until(lambda: fake.orders)
            await client.update_weights("damaged", 1)
            await client.forget_versions()
            gate.set()
            await client.update_weights("whole", 1)
            check(requests(1), await work, version=1)
            assert [path for path, _ in fake.orders] == ["/generate", *[PAUSE, UPDATE, CONTINUE] * 2, "/generate"]

    run(test)


def test_a_continued_request_keeps_the_flags_of_what_it_has() -> None:
    """Another server computes the cache again: what it generates is not stale, and what there was stays as it is."""

    async def test() -> None:
        fake = Ordered()
        answer = fake.answer

        def stale_if_interrupted(*arguments: Any) -> dict[str, Any]:
            whole = answer(*arguments)
            if arguments[2]:
                whole["meta_info"]["stale_kv"] = [[True, 2]]
            return whole

        fake.answer, fake.interrupt = stale_if_interrupted, 1  # type: ignore[method-assign]
        async with serving(fake, interruption="in_place") as client:
            [result] = await client.generate(requests(1, size=1))
            assert result.stale_kv == [True, False, False], "the last token of the first answer is sampled again"

    run(test)


# ── weights from the trainer ────────────────────────────────────────────────────────────────────────────────────────

VERSION = 3
UNWRITTEN = WeightsRef(version=VERSION, attempt="", path="", sha256="", digest="what made them")


class Trainer:
    """Hands `VERSION` to the fake server, or fails."""

    def __init__(self, fake: Ordered) -> None:
        self.fake, self.fails = fake, False

    def run(self, command: Command, answer: Any) -> Any:
        """As `TrainerClient.run`."""
        return getattr(self, command.name)(command)

    def send(self, command: Send) -> Sent:
        self.fake.orders.append(("send", "keep" if command.keep_cache else None))
        if self.fails:
            raise RuntimeError("the trainer failed")
        self.fake.version = command.version
        return Sent()


Begin = Callable[..., tuple[Engines, Ordered, Trainer]]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Engines with one server that holds version 0, for a recipe of SGLang servers."""
    opened: list[tuple[Engines, web.AppRunner]] = []

    def start(transport: str, *overrides: str) -> tuple[Engines, Ordered, Trainer]:
        recipe = load_recipe("gsm8k", ["inference.prove_weights=false", *overrides])
        engines = Engines(open_run(open_store(f"file://{tmp_path}/store"), "r", recipe), recipe, tmp_path / "logs")
        fake = Ordered()
        opened.append((engines, engines.servers.call(serve(fake))))
        supervise(engines, FakeSupervisor(fake.url))
        engines.servers.transport = transport  # type: ignore[assignment]
        client = engines.servers._supervised()
        client._ends = Ends  # there is no model
        engines.servers.call(client.adopt(0, "zero", {fake.url}))
        return engines, fake, Trainer(fake)

    yield start
    for engines, runner in opened:
        engines.servers.call(runner.cleanup())
        engines.__exit__()


def generated(engines: Engines, fake: Ordered, meanwhile: Callable[[], Any]) -> list[GenerateResult]:
    """What a request becomes that the server has when `meanwhile` begins."""

    async def gate() -> asyncio.Event:
        return asyncio.Event()

    client = engines.servers._supervised()
    fake.may_go_on = engines.servers.call(gate())
    with ThreadPoolExecutor() as pool:
        work = pool.submit(engines.servers.call, client.generate(requests(1)))
        assert fake.asked.wait(LIMIT)
        meanwhile()
        return work.result(LIMIT)


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_requests_stand_still_while_the_trainer_sends_and_go_on_once_the_version_is_known(
    begin: Begin, transport: str
) -> None:
    """The answers hold tokens of the new version, which are taken only from a server that is known to have it."""
    engines, fake, trainer = begin(transport, "rollout.max_head_offpolicyness=2")
    answer = fake.answer

    def mixed(*arguments: Any) -> dict[str, Any]:
        whole = answer(*arguments)
        whole["meta_info"] |= {"weight_versions": [(0, 1), (VERSION, 2)], "stale_kv": [(False, 1), (True, 2)]}
        return whole

    fake.answer, fake.goes_on = mixed, True  # type: ignore[method-assign]
    found = generated(engines, fake, lambda: engines.servers.serve(UNWRITTEN, trainer))  # type: ignore[arg-type]
    assert [result.versions for result in found] == [[0, VERSION, VERSION]] * 2
    assert [result.stale_kv for result in found] == [[False, True, True]] * 2
    assert fake.orders == [("/generate", None), (PAUSE, "in_place"), ("send", "keep"), (CONTINUE, None)]


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_requests_are_aborted_before_the_trainer_sends_and_continued_after(begin: Begin, transport: str) -> None:
    engines, fake, trainer = begin(transport, "rollout.max_head_offpolicyness=2", "rollout.interruption=abort")
    found = generated(engines, fake, lambda: engines.servers.serve(UNWRITTEN, trainer))  # type: ignore[arg-type]
    assert [result.versions for result in found] == [[0, VERSION, VERSION]] * 2
    before, after = fake.orders[:3], fake.orders[3:]
    assert before == [("/generate", None), (PAUSE, "abort"), ("send", None)]
    assert set(after) == {(CONTINUE, None), ("/generate", None)} and len(after) == 2, "in any order: SGLang waits"


def test_the_servers_go_on_if_the_trainer_fails(begin: Begin) -> None:
    engines, fake, trainer = begin("nccl", "rollout.max_head_offpolicyness=2")
    client, trainer.fails = engines.servers._supervised(), True
    with pytest.raises(RuntimeError, match="the trainer failed"):
        engines.servers.serve(UNWRITTEN, trainer)  # type: ignore[arg-type]
    assert fake.orders == [(PAUSE, "in_place"), ("send", "keep"), (CONTINUE, None)]
    assert not client.paused and client.stuck, "which weights it holds is not known"


def test_the_trainer_waits_for_the_end_of_requests(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engines, fake, trainer = begin("nccl", "rollout.max_head_offpolicyness=2", "rollout.interruption=drain")

    def update() -> None:
        with ThreadPoolExecutor() as pool:
            work = pool.submit(engines.servers.serve, UNWRITTEN, trainer)  # type: ignore[arg-type]
            engines.servers.loop.run(until(lambda: "change after the end of 1 requests" in caplog.text))
            assert fake.may_go_on is not None
            engines.servers.loop.loop.call_soon_threadsafe(fake.may_go_on.set)
            work.result(LIMIT)

    found = generated(engines, fake, update)
    assert [result.versions for result in found] == [[0] * 3] * 2
    assert fake.orders == [("/generate", None), ("send", None)]


def test_synchronous_runs_give_no_further_orders(begin: Begin) -> None:
    engines, fake, trainer = begin("nccl")
    engines.servers.serve(UNWRITTEN, trainer)  # type: ignore[arg-type]
    assert fake.orders == [("send", None)]
