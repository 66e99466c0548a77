"""Ranks of a trainer that are threads of this process, and exchange rows of tables over gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from waiting import LIMIT

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.ranks import use_interface
from areal_tasks.engines.trainer.tables import SharedTables

T = TypeVar("T")


def on_ranks(world: int, work: Callable[[int], T]) -> list[T]:
    """The result of `work` on each rank, all at once."""
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


def tables_of_ranks(world: int, folder: Path) -> list[SharedTables]:
    """What each of `world` ranks of a machine reads tables with, which keeps files in `folder`."""
    shared = dist.HashStore()
    use_interface()

    def of(rank: int) -> SharedTables:
        return SharedTables(Group(rank, world, shared), folder / str(rank), _gloo(rank, world, shared))

    return on_ranks(world, of)


def _gloo(rank: int, world: int, store: dist.Store) -> dist.ProcessGroup:
    """A process group that is not the only one of this process, as `dist.init_process_group` would make it."""
    group = dist.ProcessGroup(store, rank, world)
    kind = c10d.Backend.backend_type_map["gloo"]
    made = c10d.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, timedelta(seconds=LIMIT))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, made)
    return group
