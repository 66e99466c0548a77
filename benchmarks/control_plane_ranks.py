"""The cost of agreement among a trainer's ranks, which ends every command; commands that read tables do it twice.

    python -m benchmarks.control_plane_ranks [--ranks 32 128 256 512]

Each rank is a thread of this process with its own connection to the ranks' key-value store: the CPU seconds are those
of the store and of all ranks. By the clock, ranks wait for the store, which answers in one thread, and here for each
other, too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch.distributed as dist

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.ranks import serve_store
from benchmarks.bare_loop import machine

TIMES: Final = 3


def groups(ranks: int, port: int) -> list[Group]:
    """The ranks of a trainer, each with its own connection to the store at this port."""
    at = ("127.0.0.1", port, ranks, False)
    stores = [dist.TCPStore(*at, wait_for_workers=False) for _ in range(ranks)]
    return [Group(rank, ranks, dist.PrefixStore("group", store)) for rank, store in enumerate(stores)]


def agree(group: Group) -> None:
    for _ in range(TIMES):
        group.together(lambda: None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128, 256, 512])
    options = parser.parse_args(arguments)
    print(machine(), "load", os.getloadavg()[0])
    print("| ranks | s each time | CPU s |\n| --- | --- | --- |")
    for ranks in options.ranks:
        served = serve_store("127.0.0.1", 0, ranks)
        made = groups(ranks, served.port)
        with ThreadPoolExecutor(ranks) as pool:
            begun, cpu = time.perf_counter(), time.process_time()
            list(pool.map(agree, made))
        seconds, used = time.perf_counter() - begun, time.process_time() - cpu
        print(f"| {ranks} | {seconds / TIMES:.3f} | {used / TIMES:.3f} |", flush=True)


if __name__ == "__main__":
    main()
