"""Memory and processor time that the ranks of a trainer need to read the iteration that they train on, or score.

    python -m benchmarks.rows_of_ranks [--samples 8192] [--ranks 1 8 64]

Each rank is a process, on a disk that holds the store; they exchange rows over gloo. Baseline: a rank that verifies and
reads all rows. CPU s: of a rank, the mean and the most. MB: the peak resident size minus the size before, the most of
any rank; a rank that decodes a file needs more than others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

import torch
import torch.distributed as dist

from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.plan import plan_and_batch, plan_and_texts
from areal_tasks.engines.trainer.ranks import serve_store, use_interface
from areal_tasks.engines.trainer.rows import TEXT, grpo_batch, read_of, read_sequences
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.engines.trainer.tables import SharedTables
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.shards import MAX_ROWS, read_table, write_table
from benchmarks.bare_loop import machine
from benchmarks.scale_rows import iteration_tables
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

#: Of each table, the rows of a file. A rollout of 262,144 samples has 80 (`control_plane`).
TABLES: Final = {"rollout": 3277, "advantage": MAX_ROWS}
SETTINGS = Settings(
    kind="grpo", seed=0, trainer=Trainer(micro_batch_tokens=16_384), model=Model(path="none"), temperature=1.0,
    minibatches=4, total_steps=4, mean="token_mean",
)  # fmt: skip
Used = tuple[float, float]  # CPU s, MB


def written(url: str, samples: int) -> Train:
    """The command to train on an iteration of so many samples, in the store at `url`."""
    store = open_store(url)
    made = iteration_tables(0, samples, with_tokens=True)
    tables = {
        name: write_table(store, f"{samples}", name, made[name][name], max_rows=rows) for name, rows in TABLES.items()
    }
    return Train(owner=1, version=0, digest="", kind="grpo", iteration=0, tables=tables)


def all_rows(store: Store, command: Train, scores: bool, _group: Group) -> None:
    """Read the rows of all ranks: the baseline."""
    if scores:
        read_sequences(read_table(store, command.tables["rollout"], TEXT))
        return
    tables = {name: read_table(store, ref, read_of(name, ages=False)) for name, ref in command.tables.items()}
    grpo_batch(tables, command.version)


def own_rows(store: Store, command: Train, scores: bool, group: Group) -> None:
    """Read as one of the ranks of `group`."""
    fetched = SharedTables(group, Path("unused"))
    if scores:
        plan_and_texts(fetched.fetch(store, {"rollout": command.tables["rollout"]}, keeps=True), SETTINGS)
    else:
        plan_and_batch(command, SETTINGS, fetched.fetch(store, command.tables, keeps=False))


def measured(work: Callable[..., None], world: int, *arguments: object) -> list[Used]:
    """What each of `world` ranks, processes forked from this one, needs for `work`."""
    served = serve_store("127.0.0.1", 0, world)
    with multiprocessing.get_context("fork").Pool(world) as pool:
        ranks = [pool.apply_async(_measure, (rank, world, served.port, work, *arguments)) for rank in range(world)]
        return [rank.get() for rank in ranks]


def _measure(rank: int, world: int, port: int, work: Callable[..., None], url: str, *arguments: object) -> Used:
    torch.set_num_threads(1)
    use_interface()
    shared = dist.TCPStore("127.0.0.1", port, world, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)
    dist.barrier()  # all are connected
    group = Group(rank, world, dist.PrefixStore("group", shared))
    store, before, begun = open_store(url), _highest(), time.process_time()
    work(store, *arguments, group)
    used = time.process_time() - begun, _highest() - before
    group.together(lambda: None)  # none closes its connections before
    return used


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
        all_rows(open_store(url), written(url, 64), False, Group())  # the ranks inherit what a first reading loads
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # whose memory the ranks do not inherit
            command = pool.apply(written, (url, options.samples))
        print(machine(), f"{options.samples:,} samples")
        print("| reads | CPU s, mean | most | MB |\n| --- | --- | --- | --- |")
        for scores, what in ((False, "to train"), (True, "to score")):
            _print(f"{what}, all rows", measured(all_rows, 1, url, command, scores))
            for world in options.ranks:
                _print(f"{what}, rank of {world}", measured(own_rows, world, url, command, scores))


def _print(what: str, used: Sequence[Used]) -> None:
    seconds, most = zip(*used, strict=True)
    print(f"| {what} | {mean(seconds):.2f} | {max(seconds):.2f} | {max(most):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
