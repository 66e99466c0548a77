"""Real processes that are killed when new weights are committed and no server holds them yet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stage_driver import Digests, digests, drive, finished, left_over, start_marked, store_in, tiny
from waiting import wait_until

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.servers import Servers
from areal_tasks.engines.session import Engines
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.history.audit import audit
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import Recipe

RECIPE = tiny(schedule={"iterations": 2})
PROCESSES = tiny(schedule={"iterations": 2}, launcher={"type": "local"})


def expected(folder: Path, recipe: Recipe) -> Digests:
    """What a run makes that nothing interrupts."""
    finished(folder, "whole", recipe)
    return digests(folder, "whole")


Strikes = dict[int, Callable[[], None]]


def strike_between(strikes: Strikes, patch: pytest.MonkeyPatch) -> None:
    """Have each of `strikes` happen when its version is committed, and before a server loads it."""
    load = Servers._load

    def late(servers: Servers, client: InferenceClient, ref: WeightsRef) -> list[float]:
        if (strike := strikes.pop(ref.version, None)) is not None:
            assert servers.run.store.exists(ref.path)
            strike()
        return load(servers, client, ref)

    patch.setattr(Servers, "_load", late)


def main(folder: Path) -> None:
    """A driver that is killed there."""
    strike_between({1: lambda: os.kill(os.getpid(), signal.SIGKILL)}, pytest.MonkeyPatch())
    drive(folder, "r", RECIPE)


def attempts(folder: Path, version: int) -> tuple[set[str], set[str]]:
    """The folders of a version's attempts, and those of them that were committed."""
    names = store_in(folder).children(f"r/weights/version={version:06d}")
    committed = {name.removesuffix(".json") for name in names if name.endswith(".json")}
    return {name for name in names if not name.endswith(".json")}, committed


def test_the_flow(tmp_path: Path) -> None:
    process = start_marked(tmp_path, main, tmp_path)
    process.join()
    assert process.exitcode == -9
    written, committed = attempts(tmp_path, 1)
    assert len(written) == 1 and written == committed
    wait_until(lambda: not left_over(tmp_path), "the end of the processes that hold that version")
    drive(tmp_path, "r", RECIPE)
    assert digests(tmp_path, "r") == expected(tmp_path, RECIPE)
    again, committed = attempts(tmp_path, 1)
    assert again == committed and len(again) == 2, "no stage names the first"
    assert audit(store_in(tmp_path), "r").sound


def test_a_trainer_and_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engines] = []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        engines[:] = [jobs[0].context.engines]
        return run_directly(jobs)

    def strike() -> None:
        for service in engines[0].supervisor.services.values():
            process = service.handle.process  # type: ignore[attr-defined]
            process.kill()
            process.wait()

    strike_between({1: strike}, monkeypatch)
    drive(tmp_path, "r", PROCESSES, execute)
    assert digests(tmp_path, "r") == expected(tmp_path, PROCESSES)
    written, committed = attempts(tmp_path, 1)
    assert written == committed and len(written) == 1
    logs = {path.name for path in (tmp_path / "logs" / "r").iterdir()}
    assert {"trainer-1-1.log", "inference-0-1-1.log"} <= logs
