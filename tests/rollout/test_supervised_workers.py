"""Rollout workers are supervised in a thread of their own: a manager that is closed is given no workers again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import LIMIT

from areal_tasks.engines import workers
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec
from areal_tasks.engines.starting import evaluator_names, worker_names
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.engines.workers import Workers
from areal_tasks.launchers.supervisor import Ready, Supervisor
from areal_tasks.rollout.orders import Busy
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.rollout.worker.process import Worker
from areal_tasks.store.backend import open_store
from areal_tasks.store.in_flight import LEDGER
from areal_tasks.store.parallel import in_background
from schemas.recipe.launcher import Launcher
from schemas.recipe.load import parse_recipe


class Manager:
    """Records what it is given."""

    def __init__(self) -> None:
        self.given: list[Collection[tuple[str, int]]] = []

    async def use_workers(self, starts: Collection[tuple[str, int]]) -> None:
        self.given.append(starts)

    async def heartbeats(self) -> dict[str, Any]:
        return {}

    async def explained_ends(self) -> Collection[tuple[str, int]]:
        return ()


class Slow(Supervisor):
    """Finds its worker restarted after a poll in the background, which takes until `go`."""

    background, go = threading.Event(), threading.Event()

    def poll(self, names: Collection[str], *_: Any, **options: Any) -> list[Ready]:
        if threading.current_thread() is threading.main_thread():
            return [Ready("http://worker", 0)]
        self.background.set()
        assert self.go.wait(LIMIT)
        return [Ready("http://worker", 1)]


def test_a_manager_that_is_to_be_closed_gets_no_worker_from_a_look_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ready", lambda *_: None)
    recipe = parse_recipe({"name": "r", "flow": "rlhf", "model": {"path": "m"}, "data": {"source": "sums://2"}})
    supervisor, manager, loop = Slow(open_store(tmp_path.as_uri()), Launcher(), tmp_path), Manager(), LoopThread()
    served = Workers(worker_names, recipe, True, supervisor, cast(Watchdog, None), loop)
    served.serve(manager)
    polling = in_background(served.supervise, "supervise")
    assert supervisor.background.wait(LIMIT)
    threading.Timer(0.2, supervisor.go.set).start()
    served.serve(None)
    before = list(manager.given)
    supervisor.go.set()
    polling.result(LIMIT)
    loop.stop()
    assert manager.given == before, "it was closed in between"


class Ending(LoopThread):
    """Another thread ends the use of `served` just before this one runs anything in the loop."""

    served: Workers | None = None

    @property
    def run(self) -> Any:
        if self.served is not None:
            self.served.serve(None)
        return super().run


def test_heartbeats_are_asked_for_while_an_evaluation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ready", lambda *_: None)
    recipe = parse_recipe({"name": "r", "flow": "rlhf", "model": {"path": "m"}, "data": {"source": "sums://2"}})
    supervisor, loop = Supervisor(open_store(tmp_path.as_uri()), Launcher(), tmp_path), Ending()
    served = Workers(evaluator_names, recipe, True, supervisor, cast(Watchdog, None), loop)
    served.serve(cast(Any, Manager()))
    loop.served = served
    assert served.heartbeats() == {}
    loop.stop()


def test_a_worker_says_what_the_store_keeps_it_waiting_for(tmp_path: Path) -> None:
    recipe = {"launcher": {"store_seconds": 3600.0}}
    worker = Worker(cast(ServiceSpec, SimpleNamespace(store_url=tmp_path.as_uri(), recipe=recipe)))
    worker._groups = cast(Groups, SimpleNamespace(unwritten="the disk is full"))
    with LEDGER.entry("read", "x.json"):
        busy = asyncio.run(worker.busy())
    assert busy.store.startswith("read x.json for 0 s; finished groups cannot be written: the disk is full")
    worker._groups = None
    assert asyncio.run(worker.busy()) == Busy(requests={})


def test_a_worker_whose_store_hangs_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(LEDGER, "end_process", statuses.append)
    recipe = {"launcher": {"store_seconds": 0.0}}
    worker = Worker(cast(ServiceSpec, SimpleNamespace(store_url=tmp_path.as_uri(), recipe=recipe)))
    asyncio.run(worker.busy())
    assert not statuses
    with LEDGER.entry("create", "part.parquet"):
        asyncio.run(worker.busy())
    assert statuses == [UNAVAILABLE]
