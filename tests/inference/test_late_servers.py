"""Weights that must be fetched are there for a server that missed them, and no longer than one has yet to load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from test_damaged_weights import weights
from waiting import wait_until

from areal_tasks.engines import fetching, server_pool
from areal_tasks.engines.external import SERVER_TOKEN
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve


class Reader(Fake):
    """Loads weights only where there are any, as SGLang does."""

    async def update(self, request: web.Request) -> web.Response:
        if not (Path((await request.json())["model_path"]) / "model.safetensors").is_file():
            return web.json_response({"success": False, "message": "there are no weights"}, status=400)
        return await super().update(request)


@pytest.fixture
def servers() -> list[Reader]:
    return [Reader(), Reader()]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fetched weights lie, of a store that is not on this machine."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(fetching, "MEMORY", folder)
    monkeypatch.setattr(LocalBackend, "local", lambda _backend, _path: None)
    return folder


@pytest.fixture
def engines(tmp_path: Path, memory: Path, servers: list[Reader], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines with two SGLang servers that others have started."""
    monkeypatch.setenv(SERVER_TOKEN, "token")
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.02, 0.02))
    recipe = load_recipe("gsm8k")
    run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as found:
        found.initial = weights(run, tmp_path / "model")
        runners = [found.servers.call(serve(server)) for server in servers]
        found.servers.external = [server.url for server in servers]
        yield found
        for runner in runners:
            found.servers.call(runner.cleanup())
    assert not list(memory.iterdir())


def test_a_server_that_missed_a_version_loads_it_when_it_is_well(
    engines: Engines, servers: list[Reader], memory: Path
) -> None:
    servers[1].broken = True
    assert engines.initial is not None
    assert len(engines.servers.serve(engines.initial)) == 1
    servers[1].broken = False
    client = engines.servers.inference()
    wait_until(lambda: len(client.healthy()) == 2)
    assert [server.version for server in servers] == [engines.initial.version] * 2
    assert list(memory.iterdir()), "as long as no server has asked"
    assert len(engines.servers.serve(engines.initial)) == 2
    assert not list(memory.iterdir())


def test_a_server_that_is_loading_keeps_its_weights_when_there_are_newer_ones(
    engines: Engines, servers: list[Reader], memory: Path, tmp_path: Path
) -> None:
    servers[1].broken = True
    for version in (7, 8, 9):
        engines.servers.serve(weights(engines.run, tmp_path / f"version-{version}", version))
    *_, older, newest = (Path(where) for where in servers[0].updates)
    assert sorted(memory.iterdir()) == sorted([older, newest])
    assert (older / "model.safetensors").is_file()


def test_weights_that_all_have_loaded_are_not_kept(engines: Engines, memory: Path) -> None:
    assert engines.initial is not None
    assert len(engines.servers.serve(engines.initial)) == 2
    assert not list(memory.iterdir())
