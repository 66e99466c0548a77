"""What one rank of a large trainer needs before it trains or scores, to plan and to read its rows. By parts.

    python -m benchmarks.rank_of_many [--ranks 1024] [--samples 262144]

CPU seconds of one thread, the least of nine. Samples are as long as in `control_plane`, on average; the file that the
rank decodes has as many tokens as one of 80 there. The exchange is counted in messages to and from other ranks: one to
each with its size and one with its rows; and for what the plan depends on, four for each file of all ranks, its size
and its rows, which come and are passed on (a broadcast is a tree). A message costs what `rows_of_ranks` measured among
32 and 128 processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import torch
import torch.distributed as dist

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.plan import make_plan, passes_of_rank, rank_of_samples, scoring_plan
from areal_tasks.engines.trainer.rows import PLANNING, TEXT, Samples, read_of
from areal_tasks.engines.trainer.tables import SharedTables, _encoded
from areal_tasks.store.backend import open_store
from areal_tasks.store.shards import write_table
from benchmarks.bare_loop import machine
from benchmarks.rows_of_ranks import SETTINGS, TABLES
from benchmarks.scale_rows import iteration_tables, scalar_columns

TIMES: Final = 9
MESSAGE_SECONDS: Final = 45e-6
FILE_ROWS: Final = 8192  # of the made-up samples, which are shorter
TOKENS: Final = 1053  # of a sample, prompt included


def least(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    found = []
    for _ in range(TIMES):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def samples_of(count: int) -> Samples:
    """The scalars of so many samples."""
    columns = scalar_columns(0, count)
    lengths = torch.tensor(columns["num_tokens"] * (TOKENS / columns["num_tokens"].mean())).long()
    return Samples(pa.array(columns["sample_id"]), lengths, torch.ones(count, dtype=torch.bool), None)


def plan(samples: Samples, ranks: int, scores: bool) -> None:
    """Plan, and find which rank reads each sample, and the passes of one rank."""
    trainer = SETTINGS.trainer
    found = scoring_plan(samples.lengths, trainer, ranks) if scores else make_plan(samples, SETTINGS, 0, ranks)
    rank_of_samples(found, ranks)
    for number in range(1 if scores else SETTINGS.minibatches):
        passes_of_rank(found, number, 0, ranks)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=262_144)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine(), "load", os.getloadavg()[0], f"{options.ranks:,} ranks, {options.samples:,} samples")
    print("| for | plan | decode, divide | messages | exchange | together | MB of messages |\n" + "| --- " * 7 + "|")
    samples, ranks = samples_of(options.samples), options.ranks
    owners = torch.randint(0, ranks, (options.samples,), generator=torch.Generator().manual_seed(0))
    files = {name: -(-options.samples // rows) for name, rows in TABLES.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder).as_uri())
        made = iteration_tables(0, FILE_ROWS, with_tokens=True)["rollout"]["rollout"]
        file = store.local(write_table(store, "one", "rollout", made).shards[0].path)
        assert file is not None
        tables = SharedTables(Group(0, ranks, dist.HashStore()), Path(folder), names=["rollout"], files=[file])
        for scores, what, columns in ((False, "to train", read_of("rollout", ages=False)), (True, "to score", TEXT)):

            def read(columns: Sequence[str] = columns) -> list[pa.Table]:
                return tables._mine(0, {"rollout": columns}, samples.ids, owners)

            parts = read()
            broadcast = files["rollout"] if scores else sum(files.values())
            seconds = [
                least(lambda scores=scores: plan(samples, ranks, scores)),
                least(read),
                least(lambda parts=parts: [_encoded(part) for part in parts]),
                (2 * (ranks - 1) + 4 * broadcast) * MESSAGE_SECONDS,
            ]
            size = sum(len(_encoded(part)) for part in parts)
            cells = [what, *(f"{each:.3f}" for each in seconds), f"{sum(seconds):.2f}", f"{size / 1e6:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        [planning] = tables._mine(0, {"rollout": PLANNING["rollout"]}, None, None)
        print(f"what the plan depends on, of {FILE_ROWS:,} samples: {len(_encoded(planning)) / 1e3:,.0f} kB, sent once")


if __name__ == "__main__":
    main()
