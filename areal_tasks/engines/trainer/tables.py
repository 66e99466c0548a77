"""Tables that the ranks of a trainer read together: each fetches and decodes a part, and gives the others their rows.

A rank that read its samples by itself would decode nearly all rows: a pass holds samples of any part of a table. So the
store gives each file once, to one rank, which alone decodes it. Rows travel over gloo, like gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from areal_tasks.engines.trainer.group import Group
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import have_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import read_file, schema_of
from schemas.manifest import ShardRef, TableRef


class FetchedTables:
    """This rank's part of the files that the last command named: in the store, or in a folder of its own in `folder`.

    They stay there for the next command if that last one `keeps` them: training reads the rollout that was scored.
    """

    def __init__(self, group: Group, folder: Path, links: dist.ProcessGroup | None = None) -> None:
        """`links`: over which ranks exchange rows; default: torch's default group."""
        self.group = group
        self.folder = folder
        self.links = links
        self.keeps = False

    def fetch(self, store: Store, refs: Mapping[str, TableRef], keeps: bool) -> SharedTables:
        """Have each rank fetch and verify every `world`-th file of these tables.

        Raises:
            UserError: on every rank; a file is missing, or has another SHA-256 than recorded.
        """
        self.keeps = keeps
        first = sorted(refs, key=lambda name: name != "rollout")  # a kept one is then with the same ranks again
        shards = [(name, shard) for name in first for shard in refs[name].shards]
        mine = [shard for _, shard in shards[self.group.rank :: self.group.world]]
        files = self.group.together(lambda: self._fetch(store, mine))
        return SharedTables(self.group, self.links, [name for name, _ in shards], files)

    def clear(self) -> None:
        """Delete what this rank has fetched, unless it is kept."""
        if not self.keeps:
            shutil.rmtree(self._own, ignore_errors=True)

    @property
    def _own(self) -> Path:
        """Where this rank fetches to; no other rank touches it."""
        return self.folder / str(self.group.rank)

    def _fetch(self, store: Store, shards: Sequence[ShardRef]) -> list[Path]:
        """Have these files on this disk, verified, and no others in the folder."""
        folder = self._own
        files = [store.local(shard.path) or folder / f"{shard.sha256}.parquet" for shard in shards]
        for file in set(folder.glob("*")) - set(files):
            file.unlink()
        once = dict(zip(files, shards, strict=True))  # two shards of equal content are one file
        parallel(lambda file: have_file(store, once[file], file), list(once))
        return files


@dataclass(frozen=True)
class SharedTables:
    """The tables of a command: file number i is one of table `names[i]`, and with rank i % world."""

    group: Group
    links: dist.ProcessGroup | None
    names: Sequence[str]
    files: Sequence[Path]  # those of this rank

    def read(
        self,
        columns: Mapping[str, Sequence[str]],
        ids: pa.Array | None = None,
        ranks: Int[Tensor, " B"] | None = None,
    ) -> dict[str, pa.Table]:
        """These columns of some tables, as on every other rank at the same time: the rows for this rank, in order.

        Each rank decodes one file at a time, and all then exchange their rows.

        Args:
            ids: the samples to read; none: all rows.
            ranks: the rank that gets each of `ids`; none: every rank gets all.

        Raises:
            UserError: on every rank; a file has been damaged since it was verified.
        """
        world = self.group.world
        found = {name: [schema_of(name, wanted).empty_table()] for name, wanted in columns.items()}
        for first in range(0, len(self.names), world):
            names = self.names[first : first + world]
            if columns.keys().isdisjoint(names):
                continue
            mine = self.group.together(partial(self._mine, first // world, columns, ids, ranks))
            for name, part in zip(names, exchanged(mine, self.links), strict=False):
                if part is not None:
                    found[name].append(part)
        return {name: pa.concat_tables(parts) for name, parts in found.items()}

    def _mine(
        self,
        number: int,
        columns: Mapping[str, Sequence[str]],
        ids: pa.Array | None,
        ranks: Int[Tensor, " B"] | None,
    ) -> list[pa.Table | None]:
        """What each rank gets of this rank's file `number`; nothing if there is none, or it is of another table."""
        world, place = self.group.world, number * self.group.world + self.group.rank
        if place >= len(self.names) or self.names[place] not in columns:
            return [None] * world
        name = self.names[place]
        part = read_file(name, self.files[number], columns[name])
        return divided(part, ids, ranks, world)


def divided(part: pa.Table, ids: pa.Array | None, ranks: Int[Tensor, " B"] | None, world: int) -> list[pa.Table | None]:
    """The rows of `part` for each of `world` ranks, in their order; arguments as for `SharedTables.read`."""
    if ids is None:
        return [part] * world
    rows = pc.index_in(part["sample_id"], value_set=ids).combine_chunks()
    part, rows = part.filter(rows.is_valid()), rows.drop_null()
    if ranks is None or world == 1:
        return [part] * world
    of = ranks[torch.tensor(rows.to_numpy())]
    sizes = torch.bincount(of, minlength=world)
    sorted_by_rank = part.combine_chunks().take(pa.array(of.argsort(stable=True).numpy()))
    starts = sizes.cumsum(0) - sizes
    return [sorted_by_rank.slice(*each) for each in zip(starts.tolist(), sizes.tolist(), strict=True)]


def exchanged(parts: Sequence[pa.Table | None], links: dist.ProcessGroup | None) -> list[pa.Table | None]:
    """Give each rank its own of `parts`; returns what each has given this one."""
    if len(parts) == 1:
        return list(parts)
    distinct = {id(part): part for part in parts}  # where all ranks get the same part, it is encoded once
    encoded = {key: _encoded(part) for key, part in distinct.items()}
    received = _exchange_messages([encoded[id(part)] for part in parts], links)
    return [pa.ipc.open_stream(message).read_all() if len(message) else None for message in received]


def _exchange_messages(messages: Sequence[pa.Buffer], links: dist.ProcessGroup | None) -> list[pa.Buffer]:
    """Give each rank its own of `messages`, after their sizes; returns what each has given this one."""
    sizes = torch.tensor([len(message) for message in messages])
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=links)
    mine = torch.from_numpy(np.concatenate([np.frombuffer(message, np.uint8) for message in messages]))
    received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, mine, theirs.tolist(), sizes.tolist(), group=links)
    return [pa.py_buffer(part.numpy()) for part in torch.split(received, theirs.tolist())]


def _encoded(part: pa.Table | None) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    if part is not None:
        with pa.ipc.new_stream(sink, part.schema) as stream:
            stream.write_table(part)
    return sink.getvalue()
