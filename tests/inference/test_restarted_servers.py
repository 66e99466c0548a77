"""Two servers of a run, one of which is restarted: what it holds and has released is its own, wherever it listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from test_damaged_weights import VERSION, weights
from test_released_caches import Releasing
from waiting import wait_until

from areal_tasks.engines import trainers
from areal_tasks.engines.session import Engines
from areal_tasks.engines.starting import NO_MACHINE
from areal_tasks.launchers.gpus import Placement
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from areal_tasks.store.parallel import in_background
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import serve, until
from tests.inference.fake_supervisor import FakeSupervisor, supervise


class Pair(FakeSupervisor):
    """A supervisor of two servers and a trainer, all of them there."""

    def __init__(self, engines: Engines) -> None:
        self.call = engines.servers.call
        self.servers = [Releasing(version=VERSION), Releasing(version=VERSION)]
        self.runners: list[web.AppRunner] = [self.call(serve(server)) for server in self.servers]
        super().__init__(*(server.url for server in self.servers))
        self.running = [replace(one, weights=engines.servers.written) for one in self.running]

    def restart(self, index: int, same_port: bool) -> None:
        """End a server; another one takes its place."""
        port = urlsplit(self.servers[index].url).port if same_port else 0
        self.call(self.runners[index].cleanup())
        self.servers[index] = Releasing(version=VERSION)
        self.runners[index] = self.call(serve(self.servers[index], port or 0))
        one = self.running[index]
        self.running[index] = replace(one, url=self.servers[index].url, restart=one.restart + 1)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines whose trainer and two servers share a GPU, with the version in force in the store."""
    recipe = load_recipe("gsm8k", ["inference.release_memory=true", "inference.servers=2"])
    run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    held = SimpleNamespace(close=lambda: None, health=lambda: SimpleNamespace(version=0))
    monkeypatch.setattr(trainers, "TrainerClient", lambda *_a, **_o: held)
    with Engines(run, recipe, tmp_path / "logs") as found:
        found.initial = found.servers.serving = found.servers.written = weights(run, tmp_path / "model")
        found.servers.placement = Placement(("0",), (("0",), ("0",)))
        supervise(found, Pair(found))
        yield found
        for runner in pair(found).runners:
            found.servers.call(runner.cleanup())


def pair(engines: Engines) -> Pair:
    found = engines.supervisor
    assert isinstance(found, Pair)
    return found


def assert_well(engines: Engines, released: bool) -> None:
    client = engines.servers._client
    assert client is not None
    wait_until(lambda: len(client.healthy()) == 2)
    assert [(server.cache_released, server.died_of) for server in pair(engines).servers] == [(released, [])] * 2


@pytest.mark.parametrize("same_port", [True, False])
def test_a_server_that_was_started_again_lends_its_memory_too(engines: Engines, same_port: bool) -> None:
    engines.servers.inference()
    pair(engines).restart(0, same_port)
    engines.actor.at(0)
    assert_well(engines, released=True)
    engines.servers.inference()
    assert_well(engines, released=False)


@pytest.mark.parametrize("same_port", [True, False])
def test_a_server_is_not_told_to_take_what_it_never_gave(engines: Engines, same_port: bool) -> None:
    engines.actor.at(0)
    assert_well(engines, released=True)
    pair(engines).restart(1, same_port)
    engines.servers.inference()
    assert_well(engines, released=False)
    assert pair(engines).servers[0].orders == ["/release", "/resume"]


def test_a_new_client_leaves_lent_what_it_did_not_lend_itself(engines: Engines) -> None:
    """A server that fails is brought to do as the others do when it is well again: that has not changed."""
    engines.actor.at(0)
    pair(engines).restart(1, same_port=True)
    client, [first, _] = engines.servers._supervised(), pair(engines).servers
    engines.servers.call(client.evict({first.url: "it failed"}))
    engines.servers.call(until(lambda: first.url in client.healthy()))
    assert (first.cache_released, first.orders, first.died_of) == (True, ["/release"], [])


def test_nothing_is_ordered_twice_in_an_iteration(engines: Engines) -> None:
    for _ in range(2):
        engines.servers.inference()
    for _ in range(3):  # reference, train, publish
        engines.actor.at(0)
    engines.servers.inference()
    assert [server.orders for server in pair(engines).servers] == [["/release", "/resume"]] * 2


def test_servers_of_two_versions_are_brought_to_the_one_in_force(engines: Engines) -> None:
    """One did not take it and runs, the other has just been started with it: no new start would change that."""
    pair(engines).servers[0].version = VERSION - 1
    client = engines.servers.inference()
    assert client.version == VERSION
    wait_until(lambda: len(client.healthy()) == 2)
    assert [server.version for server in pair(engines).servers] == [VERSION] * 2


def test_generation_waits_for_a_server_that_has_no_machine_again(engines: Engines) -> None:
    """Its workers and the other servers answer, and are at nothing that would tell of it."""
    engines.servers.inference()
    needs = "waits for 1 GPU of one node; free in the whole cluster: 0 GPU, of 2"
    lost = SimpleNamespace(spec=SimpleNamespace(name="inference-1"), url="", logged=False, reason="")
    lost.handle, lost.job = SimpleNamespace(waiting=lambda: needs), SimpleNamespace(log="its log")
    engines.supervisor.services, over = {"inference-1": lost}, asyncio.Event()  # type: ignore[dict-item]
    engines.supervisor.members = lambda name: [engines.supervisor.services[name]]  # type: ignore[method-assign]
    client, engines.watchdog.pause = engines.servers._client, 0.0
    waiting = in_background(lambda: engines.servers.call(over.wait(), generates=client), "stage")

    def told() -> list[tuple[str, str, str, str]]:
        engines.watchdog.poll_all()
        return [(one.at, one.what, one.says, one.limit) for one in engines.watchdog.waits(0.0)]

    wait_until(lambda: ("inference-1", "generation", needs, NO_MACHINE) in told(), "it is named")
    engines.servers.loop.loop.call_soon_threadsafe(over.set)
    waiting.result()
