"""Publications that fail: whatever does, servers generate with committed weights alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from test_damaged_weights import weights
from waiting import wait_until

from areal_tasks.engines import server_pool
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.handover import name_of
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.session import Engines
from areal_tasks.engines.sharing import Followers
from areal_tasks.engines.trainer.commands import Command, Publish, Written
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.store.backend import Missing, Store, StoreError, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.objects.files import upload
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run
from schemas.errors import UserError
from schemas.manifest import WeightsManifest
from schemas.recipe.launcher import Launcher
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve
from tests.inference.fake_supervisor import FakeSupervisor, publish, supervise


class Loader(Fake):
    """Notes whose weights it holds, and loads none, or says nothing of it, as the test sets."""

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

    def run(self, command: Command, answer: Any) -> Any:
        """As `TrainerClient.run`."""
        return getattr(self, command.name)(command)

    def publish(self, command: Publish) -> Written:
        self.count += 1
        self.folder.mkdir(exist_ok=True)
        (self.folder / "model.safetensors").write_bytes(b"%d" % self.count * 100)
        files = upload(self.store, command.prefix, self.folder)
        return Written(files=files)


@contextmanager
def running(
    folder: Path, url: str = "", make: Callable[[str], Loader] = Loader
) -> Iterator[tuple[Engines, list[Loader], Author]]:
    """Engines whose two servers hold the weights in force, and the trainer."""
    recipe = load_recipe("gsm8k", ["inference.servers=2"])
    run = open_run(open_store(url or f"file://{folder}/store"), "r", recipe)
    with Engines(run, recipe, folder / "logs") as engines:
        first = weights(run, folder / "model")
        loaders = [make(name) for name in ("one", "other")]
        runners = [engines.servers.call(serve(loader)) for loader in loaders]
        supervise(engines, FakeSupervisor(*(loader.url for loader in loaders)))
        engines.servers.serve(first)
        yield engines, loaders, Author(run.store, folder / "written")
        for runner in runners:
            engines.servers.call(runner.cleanup())


def committed(store: Store, folder: str) -> int | None:
    """The version of the weights in this folder, if there are any."""
    path = Path(folder).relative_to(str(store.local("")))
    try:
        return read_record(store, f"{path}.json", WeightsManifest).version
    except Missing:
        return None


# ── whatever happens ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def failing(what: str, loaders: Sequence[Loader]) -> Iterator[None]:
    """While inside, something of a publication fails."""

    def no_space(*_: Any) -> None:
        raise StoreError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        if what == "commit":
            patch.setattr(LocalBackend, "create", no_space)
        elif what:
            how, _, which = what.partition(": ")
            for loader in loaders:
                loader.fails = how if which in ("", loader.label) else ""
        yield
    for loader in loaders:  # one that is ill was not asked
        loader.fails = ""


EVENTS = ["", "commit", "refuses", "refuses: one", "says nothing", "says nothing: other"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.booleans()), min_size=1, max_size=5))
def test_servers_generate_with_committed_weights_alone(events: list[tuple[str, bool]]) -> None:
    """Each publication of version 4 and later may fail, and a caller may ask for the servers after it or not."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
        with running(Path(folder)) as (engines, loaders, author):
            version = 4
            for what, asks in events:
                with failing(what, loaders):
                    try:
                        version = publish(engines, author, version).version + 1
                    except (UserError, ServerDown):
                        assert what
                if asks:
                    check(engines, loaders)
            check(engines, loaders)


def check(engines: Engines, loaders: Sequence[Loader]) -> None:
    """Who asks for servers gets such as hold the weights in force, which are committed."""
    client, store, ref = engines.servers.inference(), engines.run.store, engines.servers.serving
    assert ref is not None and read_record(store, ref.path, WeightsManifest).version == client.version == ref.version
    wait_until(lambda: len(client.healthy()) == 2)
    for loader in loaders:
        assert loader.version == ref.version
        assert store.local(ref.path.removesuffix(".json")) == Path(loader.holds)


def test_a_server_that_has_loaded_another_attempt_loads_what_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same number, and other bytes."""
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
    with running(tmp_path) as (engines, loaders, author):
        loaders[1].broken_health = True  # it is not let in again for now
        loaders[1].fails = "says nothing"
        first = publish(engines, author, 4)
        assert loaders[1].version == 4
        assert publish(engines, author, 4) != first
        loaders[1].broken_health = False
        check(engines, loaders)


@pytest.mark.parametrize("external", [False, True])
def test_a_server_is_not_waited_for_where_no_thread_gives_the_weights_that_all_lack(
    tmp_path: Path, external: bool
) -> None:
    """All are healthy, and what they hold is unknown. The stage that wants one is repeated, and gives them weights."""
    with running(tmp_path) as (engines, loaders, _):
        servers = engines.servers
        client, ref = servers.inference(), servers.serving
        assert ref is not None
        servers.call(client.forget_versions())
        if external:
            servers._ready, servers.external = [], client.healthy()
        holding = client.hold(name_of(ref))
        with pytest.raises(ServerDown, match="have to be given the current ones"):
            servers.call(holding, generates=client)
        assert client.stuck and len(client.healthy()) == 2 and not client.held()
        check(engines, loaders)


class Hangs(Followers):
    """Rollout workers that do not answer until they are ended: until then they may have requests on a server."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def acknowledged(self) -> None:
        await self.ended.wait()

    async def busy(self) -> Mapping[str, int]:
        await self.ended.wait()
        return {}


@contextmanager
def hanging_worker(engines: Engines, client: InferenceClient, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While inside, a rollout worker hangs until the watchdog ends it. Yields the reasons that this is given."""
    servers, worker, reasons = engines.servers, Hangs(), list[str]()

    def end(name: str, why: str) -> None:
        reasons.append(f"{name} {why}")
        servers.loop.loop.call_soon_threadsafe(worker.ended.set)

    hanging = Watchdog(Launcher(warn_seconds=0.1, hang_seconds=0.2), end)
    patch.setattr(servers, "watchdog", hanging)
    patch.setattr(servers, "_workers_heartbeats", lambda: {"rollout-0": Heartbeat(None, "no answer")})
    client.followers.parts.append(worker)
    yield reasons
    hanging.close()


def test_a_worker_that_hangs_after_a_failed_publication_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow waits until it has acknowledged that the versions are unknown."""
    with running(tmp_path) as (engines, _, author):
        client = engines.servers.inference()
        monkeypatch.setattr(client, "update_weights", lambda *_: refused())
        hangs, fails = hanging_worker(engines, client, monkeypatch), pytest.raises(UserError, match="no server takes")
        with hangs as reasons, fails:
            publish(engines, author, 4)
        assert any(why.startswith("rollout-0 hangs at an answer of the rollout workers: ") for why in reasons)


def test_a_worker_that_hangs_with_requests_on_a_server_is_ended_with_that_servers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation releases the server while the others are interrupted: first all requests on it have to end."""
    with running(tmp_path) as (engines, loaders, _):
        names = {loader.url: f"inference-{i}" for i, loader in enumerate(loaders)}
        monkeypatch.setattr(engines.supervisor, "name_at", names.__getitem__)
        ref, client = engines.servers.serving, engines.servers.inference()
        assert ref is not None
        with ExitStack() as stack:
            with engines.servers.held(ref):
                [held] = client.held()
                engines.servers.call(client.interrupt())
                reasons = stack.enter_context(hanging_worker(engines, client, monkeypatch))
            assert reasons[0].startswith(
                f"rollout-0 hangs at an answer of the rollout workers about requests on {names[held]}: no progress"
            )


async def refused() -> list[float]:
    raise UserError("no server takes them")
