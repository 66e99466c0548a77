"""How fast weights go through a store: the trainer's memory → store → files in memory, verified.

    python -m benchmarks.weights_store --store s3://BUCKET/PREFIX [--gb 1] [--server PID]

Random tensors of bfloat16 in files of 128 MiB, as the trainer publishes them. Prints seconds by the clock and CPU
seconds per GB: those of this process, and with `--server` those of the S3 server on this machine. With many cores the
time by the clock falls to the larger of the two divided by the cores, as far as the server uses them.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from areal_tasks.engines.fetching import memory
from areal_tasks.engines.trainer.snapshot import Snapshot
from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, materialise, read_weights
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from benchmarks.store import machine

ROWS, COLUMNS = 4096, 8192  # a tensor of 64 MiB


def policy(gb: float) -> Snapshot:
    """A policy of random weights."""
    raw = torch.randint(-(2**15), 2**15, (ROWS, COLUMNS), dtype=torch.int16).view(torch.bfloat16)
    count = max(1, round(gb * 1e9 / raw.nbytes))
    held = Snapshot()
    held.take(1, ((f"layer.{n}", raw.roll(n)) for n in range(count)))
    return held


@contextmanager
def measured(name: str, gb: float, server: int | None) -> Iterator[None]:
    """Print the time of the code inside: by the clock, and CPU seconds."""
    watched = {"client": psutil.Process()} | ({"server": psutil.Process(server)} if server else {})
    before = {who: process.cpu_times() for who, process in watched.items()}
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    spent = {who: process.cpu_times() for who, process in watched.items()}
    used = "".join(
        f"; {who} {(spent[who].user - before[who].user) / gb:.2f} + {(spent[who].system - before[who].system) / gb:.2f}"
        for who in watched
    )
    print(f"  {name:<28} {seconds:6.2f} s, {gb / seconds:5.2f} GB/s; CPU s/GB, user + system{used}", flush=True)


def one_by_one(store: Store, run: str, version: int, held: Snapshot, gb: float, server: int | None) -> None:
    """Measure writing, then fetching, then writing the fetched files again, as a checkpoint is written."""
    attempt, started = new_attempt(), now()
    prefix = paths.weights_attempt(run, version, attempt)
    with measured("written from memory", gb, server):
        files = held.save(store, prefix, {})
        ref = commit_weights(store, run, version, attempt, "weights", files, make_provenance(1, started))
    with TemporaryDirectory(dir=memory()) as folder:
        with measured("fetched and verified", gb, server):
            there = materialise(store, read_weights(store, ref).files, Path(folder), verify=True)
        again = paths.checkpoint_attempt(run, version, attempt)
        names = [file.path.removeprefix(f"{prefix}/") for file in files]
        with measured("written from a folder", gb, server):
            parallel(lambda name: store.put_file(f"{again}/{name}", there / name), names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="URL; credentials and endpoint from the environment")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--server", type=int, help="process of the server, if it runs here")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    store, run, held = open_store(given.store), f"bench-{uuid.uuid4().hex[:8]}", policy(given.gb)
    gb = sum(tensor.nbytes for tensor in held.tensors.values()) / 1e9
    print(f"{machine()}; store {store.url.split('://')[0]}://; {gb:.2f} GB a version", flush=True)
    for version in range(given.repeats):
        one_by_one(store, run, version, held, gb, given.server)


if __name__ == "__main__":
    main()
