"""Servers that fail while the trainer hands them weights, and weights that it has and cannot hand over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Command, Publish, Send, Sent, Written
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.supervisor import Ready
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import upload
from areal_tasks.store.opening import open_run
from schemas.manifest import WeightsRef
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve
from tests.inference.fake_supervisor import FakeSupervisor, supervise

VERSION = 3
UNWRITTEN = WeightsRef(version=VERSION, attempt="", path="", sha256="", digest="what made them")


class Trainer:
    """Hands `VERSION` to all servers but those that are `lost`; writes a small file for weights."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self.engines, self.folder = engines, folder
        self.servers: dict[str, Fake] = {}
        self.lost: set[str] = set()
        self.sent: list[list[str]] = []
        self.written: list[str] = []

    def run(self, command: Command, answer: Any) -> Any:
        """As `TrainerClient.run`."""
        return getattr(self, command.name)(command)

    def send(self, command: Send) -> Sent:
        urls = [receiver.url for receiver in command.receivers]
        self.sent.append(urls)
        for url in set(urls) - self.lost:
            self.servers[url].version = command.version
        for url in set(urls) & self.lost:
            self.servers[url].broken_health = True  # else it is let in again
        return Sent(gone={url: "no answer" for url in urls if url in self.lost})

    def publish(self, command: Publish) -> Written:
        self.written.append(command.prefix)
        self.folder.mkdir(exist_ok=True)
        (self.folder / "model.safetensors").write_bytes(b"weights")
        return Written(files=upload(self.engines.run.store, command.prefix, self.folder))


Begin = Callable[[int], list[Fake]]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines of a recipe with SGLang servers; `begin` starts some."""
    recipe = load_recipe("gsm8k")
    run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as found:
        supervise(found, FakeSupervisor())
        yield found


@pytest.fixture
def trainer(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    found = Trainer(engines, tmp_path / "written")
    monkeypatch.setattr(engines.actor, "at", lambda _version: found)
    return found


@pytest.fixture
def begin(engines: Engines, trainer: Trainer) -> Iterator[Begin]:
    """Starts servers that hold version 0, in the place of those that were there."""
    runners: list[web.AppRunner] = []

    def start(count: int) -> list[Fake]:
        fakes = [Fake(version=0) for _ in range(count)]
        runners.extend(engines.servers.call(serve(fake)) for fake in fakes)
        trainer.servers |= {fake.url: fake for fake in fakes}
        engines.supervisor.running = [Ready(fake.url) for fake in fakes]  # type: ignore[attr-defined]
        return fakes

    yield start
    for runner in runners:
        engines.servers.call(runner.cleanup())


def test_one_of_two_that_fails_is_ended_and_the_other_goes_on(engines: Engines, trainer: Trainer, begin: Begin) -> None:
    bad, good = begin(2)
    engines.servers.transport, trainer.lost = "tensor", {bad.url}
    assert len(engines.servers.serve(UNWRITTEN, trainer)) == 1  # type: ignore[arg-type]
    assert engines.supervisor.end_of == [bad.url]  # type: ignore[attr-defined]
    assert engines.servers.inference().healthy() == [good.url]


def test_each_is_sent_the_weights_of_the_rank_on_its_gpu(
    engines: Engines, trainer: Trainer, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them are left."""
    first, second = begin(2)
    servers = engines.servers
    servers.recipe = load_recipe("gsm8k", ["inference.servers=2", "trainer.ranks=2"])
    servers.transport, servers.placement = "tensor", Placement(("0", "1"), (("1",), ("0",)))
    names = {first.url: "inference-0", second.url: "inference-1"}
    monkeypatch.setattr(engines.supervisor, "name_at", names.__getitem__)
    asked, send = list[Send](), trainer.send

    def watched(command: Send) -> Sent:
        asked.append(command)
        return send(command)

    monkeypatch.setattr(trainer, "send", watched)
    trainer.lost = {first.url}
    servers.serve(UNWRITTEN, trainer)  # type: ignore[arg-type]
    ranks = [{one.url: one.trainer_rank for one in command.receivers} for command in asked]
    assert ranks[0] == {first.url: 1, second.url: 0}
    assert ranks[-1] == {second.url: 0}, "to prove that they arrive"


def test_when_all_fail_the_next_ones_are_handed_the_weights_again(
    engines: Engines, trainer: Trainer, begin: Begin
) -> None:
    (bad,) = begin(1)
    engines.servers.transport, trainer.lost = "nccl", {bad.url}
    with pytest.raises(ServerDown, match="no inference server took version 3: no answer"):
        engines.servers.serve(UNWRITTEN, trainer)  # type: ignore[arg-type]
    assert trainer.sent == [[bad.url]] == [engines.supervisor.end_of]  # type: ignore[attr-defined]
    (healed,) = begin(1)
    assert engines.servers.inference().version == healed.version == VERSION
    assert trainer.sent == [[bad.url], [healed.url], [healed.url]], "and again, to prove that they arrive"


def test_weights_that_cannot_be_handed_over_are_written_for_the_servers(
    engines: Engines, trainer: Trainer, begin: Begin
) -> None:
    """As in a run that goes on with another transport than the one it stopped with."""
    (fake,) = begin(1)
    engines.servers.serving = UNWRITTEN
    assert engines.servers.inference().version == fake.version == VERSION
    assert engines.servers.written == engines.servers.serving and engines.servers.serving.written
    engines.servers.inference()
    assert len(trainer.written) == 1 and not trainer.sent
