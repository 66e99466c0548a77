"""Tables of a remote store on the disks of the trainer's machines: the store gives each file once, to one of them.

Every machine needs all files, since a pass holds samples of any part of a table. So each fetches a part of those that
any machine lacks, and passes it on to the others. What arrives is verified like what is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.reading import Files
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import fetched_into, has_full_size, local_file
from areal_tasks.store.objects.local import unusable
from areal_tasks.store.parallel import parallel
from schemas.manifest import ShardRef, TableRef

#: Of a file, passed on at once; a machine holds as many of such pieces as there are machines.
PIECE_BYTES: Final = 4 << 20


class FetchedTables:
    """The files of the tables that the last command named, in `folder`, which the ranks of a machine share.

    They stay there for the next command if that last one `keeps` them: training reads the rollout that was scored.
    """

    def __init__(self, group: Group, folder: Path) -> None:
        self.group = group
        self.folder = folder
        self.keeps = False

    def files(self, store: Store, refs: Mapping[str, TableRef], keeps: bool) -> Files:
        """The files of these tables on this disk, verified by the first rank of each machine.

        Raises:
            UserError: on every rank; a file is missing, or has another SHA-256 than recorded.
        """
        self.keeps = keeps
        shards = [shard for ref in refs.values() for shard in ref.shards]
        if len(self.group.leaders) > 1 and any(store.local(shard.path) is None for shard in shards):
            self._share(store, shards)
        self.group.from_first_here(lambda: self._keep_only(store, shards))
        return {name: [store.local(s.path) or self._at(s) for s in ref.shards] for name, ref in refs.items()}

    def _keep_only(self, store: Store, shards: Sequence[ShardRef]) -> str:
        """Have these files here, and leave nothing else in the folder."""
        for file in set(self.folder.glob("*")) - {self._at(shard) for shard in shards}:
            file.unlink()
        return self._fetch(store, shards)

    def _fetch(self, store: Store, shards: Sequence[ShardRef]) -> str:
        """Verify these files, and fetch those that are not here or damaged. Tells the other ranks nothing."""
        parallel(lambda shard: local_file(store, shard, self.folder), shards)
        return ""

    def _share(self, store: Store, shards: Sequence[ShardRef]) -> None:
        """Have each machine fetch a part of the files that any of them lacks, and pass it on to the others."""
        machines = len(self.group.leaders)
        lacking = self.group.from_machines(lambda: json.dumps([s.sha256 for s in shards if not self._has(s)]))
        names = {name for text in lacking for name in json.loads(text)}
        missing = sorted((s for s in shards if s.sha256 in names), key=lambda s: (-s.bytes, s.sha256))
        mine = missing[self.group.machine :: machines]
        self.group.from_machines(lambda: self._fetch(store, mine))
        group = self._leaders
        if self.group.leads_its_machine:
            for start in range(0, len(missing), machines):
                self._pass_on(missing[start : start + machines], group)

    def _pass_on(self, shards: Sequence[ShardRef], group: Any) -> None:
        """Pass one of these files, the first of which is the largest, on from each machine to all others, in pieces."""
        lacked = [shard for shard in shards if not self._has(shard)]
        own = self._at(shards[self.group.machine]) if self.group.machine < len(shards) else None
        for start in range(0, shards[0].bytes, PIECE_BYTES):
            piece = torch.zeros(min(PIECE_BYTES, shards[0].bytes - start), dtype=torch.uint8)
            if own is not None:
                _read_piece(own, start, piece)
            pieces = [torch.empty_like(piece) for _ in self.group.leaders]
            dist.all_gather(pieces, piece, group=group)
            for shard, found in zip(shards, pieces, strict=False):
                if shard in lacked and start < shard.bytes:
                    self._write(shard, start, found[: shard.bytes - start])

    def _write(self, shard: ShardRef, start: int, piece: torch.Tensor) -> None:
        """Write the next piece of a file, which begins again if an earlier command has left a part of it."""
        path = self._at(shard)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # a machine that fetches none itself has no folder yet
            with path.open("ab" if start else "wb") as file:
                file.write(piece.numpy().data)
        except OSError as error:
            raise unusable(str(path), error) from error

    def _at(self, shard: ShardRef) -> Path:
        return fetched_into(self.folder, shard)

    def _has(self, shard: ShardRef) -> bool:
        return has_full_size(self._at(shard), shard)

    @cached_property
    def _leaders(self) -> Any:
        """The process group of the first rank of each machine; all ranks take part in making it."""
        return dist.new_group(list(self.group.leaders), backend="gloo")


def _read_piece(path: Path, start: int, into: torch.Tensor) -> None:
    """The bytes of a file from `start` on, as far as there are any."""
    with path.open("rb") as file:
        file.seek(start)
        file.readinto(into.numpy().data)
