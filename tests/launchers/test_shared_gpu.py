"""A trainer that shares a server's GPU takes its memory when the server has measured its own, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_driver import store_in, tiny

from areal_tasks.engines import trainers
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.session import Engines
from areal_tasks.engines.starting import TRAINER
from areal_tasks.launchers.gpus import Placement
from areal_tasks.store.opening import open_run
from schemas.recipe.sections import Inference
from tests.inference.fake_supervisor import FakeSupervisor, supervise

HELD: Any = SimpleNamespace(version=0)  # by the trainer


class Noting(FakeSupervisor):
    """Says that everything is there, and notes what is waited for."""

    def __init__(self) -> None:
        super().__init__("http://inference-0")
        self.log: list[str] = []

    def wait(self, names: Sequence[str], weights: object = None) -> list[str]:
        self.log.extend(names)
        return [f"http://{name}" for name in names]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines whose services are said to be there: what is waited for, and asked of servers, is noted in `log`."""
    recipe = tiny()
    run = open_run(store_in(tmp_path), "r", recipe)
    held = SimpleNamespace(close=lambda: None, health=lambda: HELD)
    monkeypatch.setattr(trainers, "TrainerClient", lambda *_a, **_o: held)
    with Engines(run, recipe, tmp_path / "logs") as found:
        supervise(found, Noting())
        yield found


def log(engines: Engines) -> list[str]:
    assert isinstance(engines.supervisor, Noting)
    return engines.supervisor.log


def placed(engines: Engines, server: str, monkeypatch: pytest.MonkeyPatch, held: int | None) -> list[str]:
    """What is waited for until a trainer that holds this version is used, besides itself."""
    monkeypatch.setattr(HELD, "version", held)
    monkeypatch.setattr(trainers, "restore", lambda *_: None)
    monkeypatch.setattr(engines.actor, "initial", lambda: None)
    engines.servers.placement = Placement(("0",), ((server,),))
    engines.actor.at(0)
    return [name for name in log(engines) if name != TRAINER]


@pytest.mark.parametrize(("held", "server", "waited"), [(None, "0", ["inference-0"]), (0, "0", []), (None, "1", [])])
def test_a_trainer_without_weights_waits_for_a_server_that_starts_on_its_gpu(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, held: int | None, server: str, waited: list[str]
) -> None:
    """One that holds some has its memory, and one with a GPU of its own cannot take a server's."""
    assert placed(engines, server, monkeypatch, held) == waited


def test_a_server_that_has_only_just_started_gives_its_memory_too(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart whose rollout is there already: nothing has asked for the servers yet."""
    inference = Inference(engine="sglang", release_memory=True)
    engines.servers.recipe = engines.recipe.model_copy(update={"inference": inference})

    async def release(_client: object, released: bool) -> None:
        log(engines).append("release" if released else "resume")

    async def looked_at(_client: object) -> list[str]:
        log(engines).append("looked at")
        return []

    monkeypatch.setattr(InferenceClient, "wait_healthy", looked_at)
    monkeypatch.setattr(InferenceClient, "release_caches", release)
    assert placed(engines, "0", monkeypatch, 0)[-2:] == ["looked at", "release"]
