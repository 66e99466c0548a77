"""Real processes that are killed when servers hold new weights and nothing has committed these yet."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stage_driver import Digests, digests, drive, finished, left_over, start_marked, store_in, tiny
from waiting import LIMIT, wait_until

from areal_tasks.engines import handover
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.session import Engines
from areal_tasks.stages.build import Built
from areal_tasks.stages.loop import Job, run_directly
from areal_tasks.store.backend import Store
from schemas.manifest import FileRef
from schemas.recipe.recipe import Recipe

RECIPE = tiny(schedule={"iterations": 2})
PROCESSES = tiny(schedule={"iterations": 2}, launcher={"type": "local"})


def expected(folder: Path, recipe: Recipe) -> Digests:
    """What a run makes that nothing interrupts."""
    finished(folder, "whole", recipe)
    return digests(folder, "whole")


Strikes = dict[int, Callable[[], None]]


def strike_between(strikes: Strikes, patch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Have each of `strikes` happen when the servers hold its version, and before that is committed; then, go on.

    What is returned lists the versions, when it has happened, and whether they were committed.
    """
    load, digested, loaded = InferenceClient.update_weights, handover.digested, {v: threading.Event() for v in strikes}
    seen: list[tuple[int, bool]] = []

    async def noted(client: InferenceClient, uri: str, version: int, key: str) -> list[float]:
        seconds = await load(client, uri, version, key)  # they have said that they hold it
        loaded.get(version, threading.Event()).set()
        return seconds

    def late(store: Store, files: Sequence[FileRef]) -> tuple[FileRef, ...]:
        folder = Path(files[0].path).parent
        version = int(folder.parent.name.removeprefix("version="))
        if (strike := strikes.pop(version, None)) is not None:
            assert loaded[version].wait(LIMIT)
            seen.append((version, store.exists(f"{folder}.json")))
            strike()
        return digested(store, files)

    patch.setattr(InferenceClient, "update_weights", noted)
    patch.setattr(handover, "digested", late)
    return seen


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
    assert len(written) == 1 and not committed, "the files are there, and nobody can see them"
    wait_until(lambda: not left_over(tmp_path), "the end of whoever holds that version")
    drive(tmp_path, "r", RECIPE)
    assert digests(tmp_path, "r") == expected(tmp_path, RECIPE)
    again, committed = attempts(tmp_path, 1)
    assert len(again) == 2 and committed == again - written


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

    seen = strike_between({1: strike}, monkeypatch)
    drive(tmp_path, "r", PROCESSES, execute)
    assert seen == [(1, False)]
    assert digests(tmp_path, "r") == expected(tmp_path, PROCESSES)
    written, committed = attempts(tmp_path, 1)
    assert written == committed and len(written) == 1, "what was written is what is committed"
    logs = {path.name for path in (tmp_path / "logs" / "r").iterdir()}
    assert {"trainer-1-1.log", "inference-0-1-1.log"} <= logs
