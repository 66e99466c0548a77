"""How long the trainer stands still for a checkpoint: if it waits for it, and if it trains while that is written.

    python -m benchmarks.checkpoint [135m 1.5b] [--mb-per-second 200] [--repeats 3]

The store is a folder whose files become durable no faster than `--mb-per-second`. Each repeat makes two checkpoints of
a random model, in turn: one that is waited for, and one during which training steps of `--rows` samples go on until it
is written. Other steps, with nothing beside them, are the comparison.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.writing import CheckpointWriter
from areal_tasks.store.objects.local import LocalBackend as Folder
from benchmarks.gpu.shapes import SHAPES
from benchmarks.store import machine
from benchmarks.trainer_core import add_options, learn, loaded, make_batch, make_settings


class SlowFolder(Folder):
    """A store to which one file at a time is written, at this rate."""

    def __init__(self, root: Path, bytes_per_second: float) -> None:
        super().__init__(root.as_uri(), root)
        self.rate = bytes_per_second
        self.line = threading.Lock()

    def put_file(self, path: str, source: Path) -> None:
        with self.line:
            ends = time.monotonic() + source.stat().st_size / self.rate
            super().put_file(path, source)
            time.sleep(max(ends - time.monotonic(), 0.0))


@dataclass
class Times:
    """Seconds: checkpoints that were waited for, copies of the others, and steps with and without a write beside."""

    waited: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    bytes: int = 0


def timed(work: Callable[[], object], into: list[float]) -> None:
    started = time.perf_counter()
    work()
    into.append(time.perf_counter() - started)


def repeat(times: Times, writer: CheckpointWriter, backend: LocalBackend, step: Callable[[], object], n: int) -> None:
    """A checkpoint that is waited for, some steps, and a checkpoint during which steps are made."""

    def begin(name: str) -> None:
        writer.begin(f"{name}-{n}", lambda folder: backend.plan_checkpoint(folder, Progress()))

    def wait() -> None:
        begin("waited")
        times.bytes = sum(file.bytes for file in writer.finish(f"waited-{n}", True) or ())

    timed(wait, times.waited)
    for _ in range(4):
        timed(step, times.alone)
    timed(lambda: begin("beside"), times.copied)
    while writer.finish(f"beside-{n}", False) is None:
        timed(step, times.beside)


def measure(shape: str, arguments: argparse.Namespace) -> None:
    settings = make_settings(shape, "local", arguments, 1)
    backend, batch = loaded(settings, shape), make_batch(SHAPES[shape], arguments.rows, arguments)
    times = Times()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        writer = CheckpointWriter(SlowFolder(Path(folder), arguments.mb_per_second * 1e6), Group())
        learn(backend, settings, batch)
        for n in range(arguments.repeats):
            repeat(times, writer, backend, lambda: learn(backend, settings, batch), n)
    show(shape, times, arguments.mb_per_second)


def show(shape: str, times: Times, rate: float) -> None:
    waited, copied = statistics.median(times.waited), statistics.median(times.copied)
    print(f"{shape}: a checkpoint of {times.bytes / 1e9:.2f} GB, to a store of {rate:.0f} MB/s")
    print(f"  the trainer waits for it   {waited:6.2f} s  ({listed(times.waited)})")
    print(f"  it trains meanwhile        {copied:6.2f} s  ({listed(times.copied)})   ratio {waited / copied:.1f}")
    print(f"  a step alone               {typical(times.alone)}")
    print(f"  a step beside the write    {typical(times.beside)}")


def typical(seconds: list[float]) -> str:
    return f"{statistics.median(seconds or [math.nan]):6.2f} s  (median of {len(seconds)})"


def listed(seconds: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["135m"], choices=list(SHAPES))
    parser.add_argument("--mb-per-second", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the store is; default: the system's folder for temporary files")
    add_options(parser)
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for shape in arguments.shapes:
        measure(shape, arguments)


if __name__ == "__main__":
    main()
