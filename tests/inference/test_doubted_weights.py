"""Servers that load weights before these are committed: whatever fails, they generate with committed ones alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from test_damaged_weights import weights
from waiting import LIMIT, wait_until

from areal_tasks.engines import handover, server_pool
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Write, Written
from areal_tasks.store.backend import Missing, Store, StoreError, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.files import upload
from areal_tasks.store.local import LocalBackend
from areal_tasks.store.parallel import beside
from areal_tasks.store.runs import open_run
from schemas.errors import UserError
from schemas.manifest import WeightsManifest
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve
from tests.inference.fake_supervisor import FakeSupervisor


class Loader(Fake):
    """Notes whose weights it holds, and loads none, or says nothing of it, as it is told."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.label, self.holds, self.fails = name, "", ""
        self.on_load: Callable[[], None] = lambda: None

    async def update(self, request: web.Request) -> web.Response:
        fails, self.fails = self.fails, ""
        if fails == "refuses":
            return web.json_response({"success": False, "message": "no memory"}, status=400)
        self.holds = (await request.json())["model_path"]
        answer = await super().update(request)
        self.on_load()
        if fails == "says nothing":
            assert request.transport is not None
            request.transport.close()
        return answer


class Author:
    """A trainer that writes other bytes each time, as one does that was restored on a GPU."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.count = store, folder, 0

    def publish(self, command: Write) -> Written:
        self.count += 1
        self.folder.mkdir(exist_ok=True)
        (self.folder / "model.safetensors").write_bytes(b"%d" % self.count * 100)
        files = upload(self.store, command.prefix, self.folder, digests=command.digests)
        return Written(files=files, seconds=0.1)


@contextmanager
def running(
    folder: Path, url: str = "", make: Callable[[str], Loader] = Loader
) -> Iterator[tuple[Engines, list[Loader], Author]]:
    """Engines whose two servers hold the weights in force, and the trainer."""
    recipe = load_recipe("gsm8k", ["inference.servers=2"])
    run = open_run(open_store(url or f"file://{folder}/store"), "r", "rlhf", recipe)
    with Engines(run, recipe, folder / "logs") as engines:
        first = weights(run, folder / "model")
        loaders = [make(name) for name in ("one", "other")]
        runners = [engines.call(serve(loader)) for loader in loaders]
        engines.supervisor = FakeSupervisor(*(loader.url for loader in loaders))  # type: ignore[assignment]
        engines.serve_weights(first)
        yield engines, loaders, Author(run.store, folder / "written")
        for runner in runners:
            engines.call(runner.cleanup())


def committed(store: Store, folder: str) -> int | None:
    """The version of the weights in this folder, if there are any."""
    path = Path(folder).relative_to(str(store.local("")))
    try:
        return read_record(store, f"{path}.json", WeightsManifest).version
    except Missing:
        return None


# ── the order of things ─────────────────────────────────────────────────────────────────────────────────────────────


def test_servers_load_before_the_weights_are_committed_and_are_believed_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, digested, seen = threading.Event(), handover.digested, []

    def late(*arguments: Any) -> Any:
        assert loaded.wait(LIMIT)
        return digested(*arguments)

    with running(tmp_path) as (engines, loaders, author):
        monkeypatch.setattr(handover, "digested", late)
        old, store = engines.serving, engines.run.store

        def note() -> None:
            seen.append((committed(store, loaders[0].holds), engines.serving))
            loaded.set()

        loaders[0].on_load = note
        done = engines.write_weights(author, 4)  # type: ignore[arg-type]
        assert seen == [(None, old)]
        assert committed(store, loaders[0].holds) == 4 and engines.serving == engines.written == done.ref
        assert len(done.load_seconds) == 2 and all(len(file.sha256) == 64 for file in done.files)
        count = len(loaders[0].updates)
        assert engines.inference().version == 4 and len(loaders[0].updates) == count, "nothing is loaded twice"


def test_weights_whose_commit_fails_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as (engines, loaders, author):
        old = engines.serving
        with failing("commit", loaders), pytest.raises(StoreError, match="the disk is full"):
            engines.write_weights(author, 4)  # type: ignore[arg-type]
        assert [loader.version for loader in loaders] == [4, 4] and engines.serving == engines.written == old
        assert old is not None and engines.inference().version == old.version
        assert [loader.version for loader in loaders] == [old.version] * 2
        assert engines.write_weights(author, 4).ref.version == engines.inference().version == 4  # type: ignore[arg-type]


# ── whatever happens ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def failing(what: str, loaders: Sequence[Loader]) -> Iterator[None]:
    """While inside, something of a publication fails."""

    def no_space(*_: Any) -> None:
        raise StoreError("the disk is full")

    def cut_short(store: Store, files: Any) -> Any:
        place = store.local(files[0].path)
        assert place is not None
        place.write_bytes(b"less")
        return digested(store, files)

    digested = handover.digested
    with pytest.MonkeyPatch.context() as patch:
        if what == "commit":
            patch.setattr(LocalBackend, "create", no_space)
        elif what == "files":
            patch.setattr(handover, "digested", cut_short)
        elif what:
            how, _, which = what.partition(": ")
            for loader in loaders:
                loader.fails = how if which in ("", loader.label) else ""
        yield


EVENTS = ["", "commit", "files", "refuses", "refuses: one", "says nothing", "says nothing: other"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.booleans()), min_size=1, max_size=5))
def test_servers_generate_with_committed_weights_alone(events: list[tuple[str, bool]]) -> None:
    """Each publication of version 4 and later may fail, and somebody may ask for the servers after it or not."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
        with running(Path(folder)) as (engines, loaders, author):
            version = 4
            for what, asks in events:
                with failing(what, loaders):
                    try:
                        version = engines.write_weights(author, version).ref.version + 1  # type: ignore[arg-type]
                    except (UserError, ServerDown):
                        assert what
                if asks:
                    check(engines, loaders)
            check(engines, loaders)


def check(engines: Engines, loaders: Sequence[Loader]) -> None:
    """Who asks for servers gets such as hold the weights in force, which are committed."""
    client, store, ref = engines.inference(), engines.run.store, engines.serving
    assert ref is not None and read_record(store, ref.path, WeightsManifest).version == client.version == ref.version
    wait_until(lambda: len(client.healthy()) == 2)
    for loader in loaders:
        assert loader.version == ref.version
        assert store.local(ref.path.removesuffix(".json")) == Path(loader.holds)


def test_a_server_that_loaded_a_draft_and_could_not_say_so_loads_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same number, and other bytes."""
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
    with running(tmp_path) as (engines, loaders, author):
        loaders[1].broken_health = True  # it is not let in again for now
        with failing("says nothing: other", loaders), pytest.raises(StoreError), failing("commit", loaders):
            loaders[1].fails = "says nothing"
            engines.write_weights(author, 4)  # type: ignore[arg-type]
        draft = loaders[1].holds
        assert loaders[1].version == 4 and committed(engines.run.store, draft) is None
        engines.write_weights(author, 4)  # type: ignore[arg-type]
        loaders[1].broken_health = False
        check(engines, loaders)
        assert loaders[1].holds != draft


def test_a_trainer_need_not_hash_what_is_hashed_at_the_commit(tmp_path: Path) -> None:
    asked: list[bool] = []
    with running(tmp_path) as (engines, _, author):

        def publish(command: Write) -> Written:
            asked.append(command.digests)
            return author.publish(command)

        trainer = SimpleNamespace(publish=publish)
        engines.write_weights(trainer, 4)  # type: ignore[arg-type]
        engines.write_weights(trainer, 5, handed=True)  # type: ignore[arg-type]
        assert asked == [False, True] and engines.serving == engines.written
        assert engines.written is not None and engines.written.version == 5


def test_the_failure_beside_a_failure_is_told_but_never_over_an_interrupt() -> None:
    def fails() -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="full"), beside(fails):
        raise ServerDown("no answer")
    with pytest.raises(KeyboardInterrupt), beside(fails):
        raise KeyboardInterrupt
    with pytest.raises(StoreError, match="full"), beside(fails):
        pass
