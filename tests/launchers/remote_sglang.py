"""Stand-ins for SGLang behind node agents, the weights in the store that they begin with, and what they have open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import NETWORK

from areal_tasks.engines.fetching import PREFIX, memory
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import digest_of, read_weights
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher

FAKE = Path(__file__).parents[1] / "sglang" / "fake"


@contextmanager
def supervised(
    store: Store, weights: WeightsRef, tmp_path: Path, parts: Iterable[tuple[str, int, str]], **inference: Any
) -> Iterator[Supervisor]:
    """A supervisor of services of SGLang, each given by its name, the number of its machine, and its group.

    A stand-in has a process that leaves its session, and so outlives a service that is killed: it is ended here.
    """
    recipe = {"seed": 0, "model": {"path": "m"}, "inference": {"engine": "sglang", **inference}}
    settings = Launcher(type="processes:Processes", network=NETWORK, startup_seconds=600.0)
    with pytest.MonkeyPatch.context() as patch, Supervisor(store, settings, tmp_path / "logs") as made:
        patch.syspath_prepend(FAKE)
        for name, node, group in parts:
            spec = ServiceSpec(
                name=name, node=node, restart=0, store_url=store.url, run=tmp_path.name, owner=1, recipe=recipe,
                weights=weights,
            )  # fmt: skip
            made.start("areal_tasks.engines.sglang", spec, group=group)
        yield made
    for process in processes_of(store):
        process.kill()


def processes_of(store: Store) -> list[psutil.Process]:
    """The processes of stand-ins that know this store."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("AREALFLOW_STORE") == store.url:
                found.append(process)
    return found


def memory_of(store: Store, ref: WeightsRef) -> Path:
    """The folder in memory into which weights are fetched."""
    return memory() / f"{PREFIX}{os.getuid()}-{digest_of(read_weights(store, ref).files)}"


def opened(process: psutil.Process) -> list[Path]:
    """The folders that a process has open; none if it has ended."""
    try:
        return [Path(os.readlink(link)) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:
        return []
