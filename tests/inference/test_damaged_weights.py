"""Servers that have loaded damaged weights are not generated with: not by who asks again, nor by who asks meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import LIMIT, held_back, wait_until

from areal_tasks.engines import fetching
from areal_tasks.engines.external import SERVER_TOKEN
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, read_weights, upload
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve
from tests.inference.fake_supervisor import FakeSupervisor, supervise

VERSION = 3


@pytest.fixture(params=["external", "own"])
def engines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines with one SGLang server, which holds version 0 while version 3 is in force."""
    monkeypatch.setenv(SERVER_TOKEN, "token")
    recipe = load_recipe("gsm8k")
    run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as found:
        found.initial = found.servers.serving = found.servers.written = weights(run, tmp_path / "model")
        fake = Fake(version=0)
        runner = found.servers.call(serve(fake))
        if request.param == "external":
            found.servers.external = [fake.url]
        else:
            supervise(found, FakeSupervisor(fake.url))
        yield found
        found.servers.call(runner.cleanup())


def weights(run: Run, folder: Path, version: int = VERSION) -> WeightsRef:
    folder.mkdir()
    (folder / "model.safetensors").write_text(f"weights {version}" * 1000)
    attempt = new_attempt()
    files = upload(run.store, weights_attempt("r", version, attempt), folder)
    return commit_weights(run.store, "r", version, attempt, "weights", files, make_provenance(1, now()))


def flip(engines: Engines) -> None:
    """Alter a bit of the weights in force, or set it right."""
    assert engines.servers.serving is not None
    path = engines.run.store.local(read_weights(engines.run.store, engines.servers.serving).files[0].path)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def test_damaged_weights_are_refused_as_often_as_they_are_asked_for(engines: Engines) -> None:
    flip(engines)
    for _ in range(2):  # a task that is retried has the same engines
        with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
            engines.servers.inference()
    flip(engines)
    assert engines.servers.inference().version == VERSION


def test_weights_that_could_not_be_served_are_no_others_to_who_generates(engines: Engines) -> None:
    flip(engines)
    assert engines.servers.serving is not None
    with pytest.raises(UserError, match="damaged"):
        engines.servers.serve(engines.servers.serving)
    with pytest.raises(UserError, match="damaged"):
        engines.servers.inference()


class Awaited:
    """A lock that says when a thread waits for it."""

    def __init__(self) -> None:
        self.lock, self.event = threading.RLock(), threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if self.lock.acquire(blocking=False):
            return True
        self.event.set()
        return self.lock.acquire(blocking=blocking)

    def release(self) -> None:
        self.lock.release()


def test_who_asks_while_the_files_are_hashed_waits_for_what_is_found(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one level run side by side."""
    lock = Awaited()
    monkeypatch.setattr(engines.servers, "_lock", lock)
    flip(engines)
    with ThreadPoolExecutor(2) as pool, held_back(fetching, "materialise") as go_on:
        first = pool.submit(engines.servers.inference)
        wait_until(lambda: engines.servers._client is not None)  # the first holds the lock
        second = pool.submit(engines.servers.inference)
        wait_until(lambda: lock.event.is_set() or second.done(), "the second at the lock")
        waited = not second.done()
        go_on.set()
        assert waited
        for asked in (first, second):
            with pytest.raises(UserError, match="damaged"):
                asked.result(LIMIT)
