"""The load of an iteration of a 7B model on 64, 512 and 1,024 GPUs on the flow, Prefect's server and the store.

    python -m benchmarks.control_plane_servers [--gpus 64 512 1024]

The flow's seconds are those of `control_plane`, with the same load. The cost of a task run to Prefect's server, and of
a request to an S3 server (SeaweedFS), is measured at real servers, one request after the other, as CPU seconds of their
processes; then it is multiplied. Requests of the flow are counted in an asynchronous quickstart; those for tables
follow from the load: each file is fetched once, by one of the ranks that train.

The upper bound of what this adds to the critical path: all of the flow's requests and task runs in sequence, though
most are made while the previous iteration trains. All training machines also wait for tables before they train: the
last column is the rate at which the store must send them, to all machines together, so that this adds 2 %, too.
The commands among ranks (`control_plane_ranks`), decoding and the exchange of rows (`rows_of_ranks`) are not included,
nor are weights: they go from GPU to GPU, or see `simulate_scale`. Times by the clock are the lowest tenth, since other
work may share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import psutil
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.shards import MAX_ROWS
from benchmarks.bare_loop import machine
from benchmarks.control_plane import Cost, run, trained_tokens
from benchmarks.overhead import prefect_server
from benchmarks.simulate import Load
from benchmarks.simulate_scale import GROUPS_PER_GPU
from benchmarks.unit_costs import per_iteration
from tests.s3_server import BUCKET, s3_server

TIMES: Final = 100
SETTLE_SECONDS: Final = 15.0  # Prefect's server records task runs some seconds later
OTHER_ARTIFACTS: Final = 4  # besides one for each stage: progress, the iteration's page, two of its rollouts
TARGET: Final = 0.02  # of an iteration
PART: Final = 16 * 10**6
RECORD: Final = 2000
ROLLOUT_BYTES: Final = 3.3  # of a token on disk, and of one of a further column: results/store-2cpu.txt
COLUMN_BYTES: Final = 1.7


@dataclass(frozen=True)
class Unit:
    """Seconds by the clock, and processor seconds of the server, for one request, task run or artifact."""

    seconds: float
    server: float


@dataclass(frozen=True)
class StoreUnits:
    """The costs of a store: of creating and reading records of 2 kB, and of putting and fetching parts of 16 MB."""

    create: Unit
    read: Unit
    put: Unit
    fetch: Unit


@dataclass(frozen=True)
class Counted:
    """Of the flow's process in an iteration of the quickstart: requests to the store, task runs, and how often it
    reads each shard of the rollout."""

    requests: float
    tasks: float
    reads: float


@dataclass(frozen=True)
class Asked:
    """The requests of an iteration to the store."""

    requests: float
    put_bytes: float
    fetched_bytes: float
    at_once: float  # bytes of these that the training machines fetch before they train


def cost(do: Callable[[int], object], times: int = TIMES, settle: float = 0.0) -> Unit:
    """The cost of one call, after three for warm-up. `settle`: seconds in which the server may still work for it."""
    clocks = []
    idle = _server_seconds()
    time.sleep(settle)
    idle = _server_seconds() - idle
    for n in range(3):
        do(n)
    server, begun = _server_seconds(), time.perf_counter()
    for n in range(3, times + 3):
        started = time.perf_counter()
        do(n)
        clocks.append(time.perf_counter() - started)
    took = time.perf_counter() - begun
    time.sleep(settle)
    rest = idle * (took + settle) / settle if settle else 0.0
    return Unit(sorted(clocks)[times // 10], max(_server_seconds() - server - rest, 0.0) / times)


def _server_seconds() -> float:
    """CPU seconds of the processes that this one has started, which are a server's."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def prefect_units(folder: Path) -> tuple[Unit, Unit]:
    """The costs of a task run that does nothing, and of an artifact."""

    @task
    def nothing() -> None: ...

    @flow
    def measured() -> tuple[Unit, Unit]:
        page = "x" * RECORD
        artifact = cost(lambda n: create_markdown_artifact(page, key=f"page-{n}"), settle=SETTLE_SECONDS)
        return cost(lambda n: nothing(), settle=SETTLE_SECONDS), artifact

    with prefect_server(folder) as address, temporary_settings({PREFECT_API_URL: address}):
        return measured()


def store_units(store: Store, folder: Path) -> StoreUnits:
    """The costs of this store; `folder` is for fetched files."""
    name, record, part = f"units-{uuid.uuid4().hex}", os.urandom(RECORD), os.urandom(PART)
    return StoreUnits(
        create=cost(lambda n: store.create(f"{name}/{n}.json", record)),
        read=cost(lambda n: store.read(f"{name}/{n}.json")),
        put=cost(lambda n: store.put(f"{name}/{n}.parquet", part), times=10),
        fetch=cost(lambda n: store.fetch_file(f"{name}/{n}.parquet", folder / "fetched"), times=10),
    )


@contextmanager
def rollout_reads() -> Iterator[list[str]]:
    """The shards of the table `rollout` that this process reads."""
    found: list[str] = []
    original = LocalBackend.read

    def read(store: LocalBackend, path: str) -> bytes:
        if "/stage=rollout/attempt=" in path:
            found.append(path)
        return original(store, path)

    with patch.object(LocalBackend, "read", read):
        yield found


def asked(gpus: int, parts: int, counted: Counted) -> Asked:
    """The requests of an iteration whose rollout has `parts` parts."""
    load = Load(groups=GROUPS_PER_GPU * gpus)
    tokens = trained_tokens(load)
    shards = -(-load.groups * load.group_size // MAX_ROWS)  # of verify, advantage, proximal, train_samples, scalars
    rollout, others = tokens * ROLLOUT_BYTES, 2 * tokens * COLUMN_BYTES  # advantages and proximal logprobs
    at_once = rollout + others
    return Asked(
        requests=counted.requests + (parts - 1) * (1 + counted.reads) + 5 * (shards - 1) + parts + 2 * shards,
        put_bytes=rollout + others,
        fetched_bytes=counted.reads * rollout + at_once,
        at_once=at_once,
    )


COLUMNS: Final = (
    "GPUs", "flow, CPU s", "Prefect's server, CPU s", "requests", "a second", "store for requests, CPU s",
    "tables, GB", "store for tables, CPU s", "critical path: requests and tasks, s", "share",
    "GB/s to the trainer",
)  # fmt: skip


def row(gpus: int, side: tuple[Cost, float], prefect: tuple[Unit, Unit], units: StoreUnits, counted: Counted) -> str:
    """The row of the table for this number of GPUs."""
    (of_flow, seconds), (run_of_task, artifact) = side, prefect
    what, artifacts = asked(gpus, of_flow.parts, counted), counted.tasks + OTHER_ARTIFACTS
    of_prefect = counted.tasks * run_of_task.server + artifacts * artifact.server
    tables = (what.put_bytes * units.put.server + what.fetched_bytes * units.fetch.server) / PART
    in_turn = counted.requests * units.create.seconds + counted.tasks * run_of_task.seconds
    cells = (
        f"{gpus:,}", f"{of_flow.whole:.2f}", f"{of_prefect:.2f}", f"{what.requests:,.0f}",
        f"{what.requests / seconds:.1f}", f"{what.requests * units.read.server:.1f}",
        f"{(what.put_bytes + what.fetched_bytes) / 1e9:,.1f}", f"{tables:,.1f}", f"{in_turn:.2f}",
        f"{in_turn / seconds:.1%}", f"{what.at_once / (TARGET * seconds) / 1e9:,.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def show(
    name: str,
    units: StoreUnits,
    sides: Mapping[int, tuple[Cost, float]],
    prefect: tuple[Unit, Unit],
    counted: Counted,
) -> None:
    """Print the costs of a store, and what follows for each number of GPUs."""
    measured = (f"{what} {1e3 * u.seconds:.1f} / {1e3 * u.server:.1f}" for what, u in vars(units).items())
    print(f"\n{name}, ms by the clock / of the server's processors: {'; '.join(measured)}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    for gpus, side in sides.items():
        print(row(gpus, side, prefect, units, counted), flush=True)


def flow_side(gpus: int, iterations: int) -> tuple[Cost, float]:
    """What the flow does in an iteration, and its seconds, as `control_plane` measures them."""
    with tempfile.TemporaryDirectory() as folder:
        found, seconds = asyncio.run(run(gpus, iterations, Path(folder)))
    return Cost(whole=found.whole / iterations, parts=round(found.parts / iterations)), seconds / iterations


def count(folder: Path) -> Counted:
    with rollout_reads() as read:
        requests, tasks = per_iteration(folder)
    return Counted(requests, tasks, len(read) / len(set(read)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 512, 1024])
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args(arguments)
    print(machine(), "load", os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as folder:
        counted, prefect = count(Path(folder)), prefect_units(Path(folder))
        print(f"the flow, per iteration: {counted}")
        for what, unit in zip(("a task run", "an artifact"), prefect, strict=True):
            print(f"{what}: {1e3 * unit.seconds:.1f} ms, {1e3 * unit.server:.1f} ms of the server's processors")
        sides = {gpus: flow_side(gpus, options.iterations) for gpus in options.gpus}
        disk = open_store((Path(folder) / "store").as_uri())
        show("disk", store_units(disk, Path(folder)), sides, prefect, counted)
        with (
            tempfile.TemporaryDirectory() as data,
            s3_server(Path(data)) as server,
            patch.dict(os.environ, server.environment),
        ):
            units = store_units(open_store(f"s3://{BUCKET}/store"), Path(folder))
            show("S3 (SeaweedFS)", units, sides, prefect, counted)


if __name__ == "__main__":
    main()
