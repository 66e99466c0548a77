"""Memory and time that one of several ranks needs to read the iteration that it trains on, or that it scores.

    python -m benchmarks.rows_of_ranks [--samples 8192] [--ranks 1 8 64]

Baseline: a rank that fetches, verifies and reads all rows. Each measurement has its own process; the ranks' files are
on this disk and verified, which the first rank of a machine does once. Memory: the peak resident size minus the size
before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.reading import passes_and_batch, plan_and_batch
from areal_tasks.engines.trainer.rows import TEXT, grpo_batch, read_of, read_sequences
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.shards import read_table, write_table
from benchmarks.bare_loop import machine
from benchmarks.scale_rows import iteration_tables
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

TABLES = ("rollout", "advantage")
SETTINGS = Settings(
    kind="grpo", seed=0, trainer=Trainer(micro_batch_tokens=16_384), model=Model(path="none"), temperature=1.0,
    minibatches=4, iterations=1, mean="token_mean",
)  # fmt: skip


def written(store: Store, samples: int) -> Train:
    """The command to train on an iteration of so many samples."""
    made = iteration_tables(0, samples, with_tokens=True)
    tables = {name: write_table(store, "made", name, made[name][name]) for name in TABLES}
    return Train(owner=1, version=0, digest="", kind="grpo", iteration=0, tables=tables)


def all_rows(store: Store, command: Train, scores: bool) -> None:
    """Read the rows of all ranks: the baseline."""
    if scores:
        read_sequences(read_table(store, command.tables["rollout"], TEXT))
        return
    tables = {name: read_table(store, ref, read_of(name, ages=False)) for name, ref in command.tables.items()}
    grpo_batch(tables, command.version)


def own_rows(store: Store, command: Train, scores: bool, world: int) -> None:
    """Read as rank 0 of `world`."""
    local = {name: [store.local(shard.path) for shard in ref.shards] for name, ref in command.tables.items()}
    files = {name: [file for file in of if file] for name, of in local.items()}
    if scores:
        passes_and_batch(files, SETTINGS, 0, world)
    else:
        plan_and_batch(command, SETTINGS, files, 0, world)


def measured(work: Callable[..., None], *arguments: object) -> tuple[float, float]:
    """Seconds, and the peak MB above the size before, in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (work, *arguments))


def _measure(work: Callable[..., None], url: str, *arguments: object) -> tuple[float, float]:
    store, before, begun = open_store(url), _highest(), time.perf_counter()
    work(store, *arguments)
    return time.perf_counter() - begun, _highest() - before


def _highest() -> float:
    """The peak MB of this process; unlike `ru_maxrss`, it excludes what the parent process had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        url = Path(folder).as_uri()
        command = written(open_store(url), options.samples)
        print(machine(), f"{options.samples:,} samples")
        print("| reads | s | MB | of all rows' |\n| --- | --- | --- | --- |")
        for scores, what in ((False, "to train"), (True, "to score")):
            seconds, base = measured(all_rows, url, command, scores)
            print(f"| {what}, all rows | {seconds:.2f} | {base:,.0f} | 100% |", flush=True)
            for world in options.ranks:
                seconds, most = measured(own_rows, url, command, scores, world)
                print(f"| {what}, rank of {world} | {seconds:.2f} | {most:,.0f} | {most / base:.0%} |", flush=True)


if __name__ == "__main__":
    main()
