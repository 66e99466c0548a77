"""Tables that the ranks of a trainer read together: each fetches and decodes a part, and gives the others their rows.

A rank that read its samples by itself would decode nearly all rows: a pass holds samples of any part of a table. So the
store gives each file once, to one rank, which alone decodes it. Rows travel over gloo, like gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from areal_tasks.engines.trainer.group import Group
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import have_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import read_file, schema_of
from schemas.manifest import ShardRef, TableRef

#: The rank that gets a row which is not asked for.
_NONE: Final = -1


@dataclass
class SharedTables:
    """The tables of the last command: file number i is one of table `names[i]`, and with rank i % world.

    `files` are those of this rank, in the store or in `folder`, its own. There they stay for the next command if that
    last one `keeps` them: training reads the rollout that was scored.
    """

    group: Group
    folder: Path
    links: dist.ProcessGroup | None = None  # over which ranks exchange rows; None: torch's default group
    keeps: bool = False
    names: Sequence[str] = ()
    files: Sequence[Path] = ()

    def fetch(self, store: Store, refs: Mapping[str, TableRef], keeps: bool) -> SharedTables:
        """Have each rank fetch and verify every `world`-th file. UserError on all: one is missing or damaged."""
        self.keeps = keeps
        first = sorted(refs, key=lambda name: name != "rollout")  # a kept one is then with the same ranks again
        shards = [(name, shard) for name in first for shard in refs[name].shards]
        mine = [shard for _, shard in shards[self.group.rank :: self.group.world]]
        self.files = self.group.together(lambda: self._fetch(store, mine))
        self.names = [name for name, _ in shards]
        return self

    def clear(self) -> None:
        """Delete what this rank has fetched, unless it is kept."""
        if not self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _fetch(self, store: Store, shards: Sequence[ShardRef]) -> list[Path]:
        """Have these files on this disk, verified, and no others in the folder."""
        files = [store.local(shard.path) or self.folder / f"{shard.sha256}.parquet" for shard in shards]
        for file in set(self.folder.glob("*")) - set(files):
            file.unlink()
        once = dict(zip(files, shards, strict=True))  # two shards of equal content are one file
        parallel(lambda file: have_file(store, once[file], file), list(once))
        return files

    def read(
        self, columns: Mapping[str, Sequence[str]], ids: pa.Array | None = None, ranks: Int[Tensor, " B"] | None = None
    ) -> dict[str, pa.Table]:
        """These columns of some tables, as on every other rank at the same time: the rows for this rank, in order.

        `ids`: the samples to read; None: all. `ranks`: the rank that gets each; None: every rank. All decode one file
        each, then exchange rows, and so on. UserError, on all: a file was damaged after it was verified.
        """
        world = self.group.world
        found = {name: [schema_of(name, wanted).empty_table()] for name, wanted in columns.items()}
        for first in range(0, len(self.names), world):
            of_ranks = enumerate(self.names[first : first + world])
            wanted = {rank: name for rank, name in of_ranks if name in columns}
            if not wanted:
                continue
            mine = self.group.together(partial(self._mine, first // world, columns, ids, ranks))
            if ranks is None or world == 1:
                parts = [_given_to_all(mine, root, self.group, self.links) for root in wanted]
            else:
                parts = _exchanged(mine, wanted, world, self.links)
            for name, part in zip(wanted.values(), parts, strict=True):
                found[name].append(part)
        return {name: pa.concat_tables(parts) for name, parts in found.items()}

    def _mine(
        self, number: int, columns: Mapping[str, Sequence[str]], ids: pa.Array | None, ranks: Int[Tensor, " B"] | None
    ) -> list[pa.Table]:
        """The rows of this rank's file `number` for each rank; one table if all get the same; [] if not asked for."""
        place = number * self.group.world + self.group.rank
        if place >= len(self.names) or self.names[place] not in columns:
            return []
        part = read_file(self.names[place], self.files[number], columns[self.names[place]])
        if ids is None:
            return [part]
        found = pc.index_in(ids, value_set=part["sample_id"].combine_chunks())  # a file has fewer samples than `ids`
        owners = torch.full((part.num_rows,), _NONE)
        of_ids = torch.zeros(len(ids), dtype=torch.int64) if ranks is None else ranks
        owners[torch.tensor(found.drop_null().to_numpy())] = of_ids[torch.tensor(found.is_valid().to_numpy(False))]
        if (owners == _NONE).any():
            part, owners = part.filter(pa.array((owners != _NONE).numpy())), owners[owners != _NONE]
        return [part] if ranks is None or self.group.world == 1 else _divided(part, owners, self.group.world)


def _divided(part: pa.Table, owners: Int[Tensor, " n"], world: int) -> list[pa.Table]:
    """The rows of `part` that each of `world` ranks owns, in their order."""
    sizes = torch.bincount(owners, minlength=world)
    sorted_by_rank = part.combine_chunks().take(pa.array(owners.argsort(stable=True).numpy()))
    starts = sizes.cumsum(0) - sizes
    return [sorted_by_rank.slice(*each) for each in zip(starts.tolist(), sizes.tolist(), strict=True)]


def _given_to_all(mine: list[pa.Table], root: int, group: Group, links: dist.ProcessGroup | None) -> pa.Table:
    """The table that the rank `root` has, on every rank."""
    if group.world == 1:
        return mine[0]
    message = _encoded(mine[0]) if group.rank == root else None
    size = torch.tensor([0 if message is None else len(message)])
    dist.broadcast(size, group=links, group_src=root)
    message = torch.empty(int(size), dtype=torch.uint8) if message is None else message
    dist.broadcast(message, group=links, group_src=root)
    return _decoded(message)


def _exchanged(
    mine: list[pa.Table], roots: Iterable[int], world: int, links: dist.ProcessGroup | None
) -> list[pa.Table]:
    """What each of the ranks `roots` has for this one; `mine` is what this one has for each, if anything."""
    messages = [_encoded(part) for part in mine] or [torch.empty(0, dtype=torch.uint8)] * world
    sizes = torch.tensor([len(message) for message in messages])
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=links)
    received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(messages), theirs.tolist(), sizes.tolist(), group=links)
    of_ranks = torch.split(received, theirs.tolist())
    return [_decoded(of_ranks[root]) for root in roots]


def _encoded(part: pa.Table) -> Shaped[Tensor, " bytes"]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, part.schema) as stream:
        stream.write_table(part)
    return torch.frombuffer(sink.getvalue(), dtype=torch.uint8)


def _decoded(message: Shaped[Tensor, " bytes"]) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(message.numpy())).read_all()
