"""Shards of which SQL reads parts: what can be said of a file's bytes without reading all of it.

The SHA-256 of a shard vouches for the whole alone. So a small one is read whole and hashed; of a large one the length
and the footer's own checksum are looked at, and Arrow checks each page that it decodes by the page's checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.inventory import open_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import footer_holds
from schemas.manifest import ShardRef

#: Hashing that many bytes takes about as long as opening one Parquet file, half a millisecond.
WHOLE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 64  # files that are looked at before the first of them is scanned
_THREADS: Final = 32  # they wait for the network


@dataclass
class ShardCheck:
    """Looks at shards before they are scanned, at each once."""

    store: Store
    root: str  # of the store, in the file system that scans it
    known: dict[str, ShardRef] = field(default_factory=dict)
    sound: set[str] = field(default_factory=set)

    def add(self, shard: ShardRef) -> str:
        """The path by which this shard will be scanned."""
        path = f"{self.root}/{shard.path}"
        self.known[path] = shard
        return path

    def __call__(self, paths: Sequence[str]) -> None:
        """StoreError if one of these is not what its manifest names; what is no known shard is passed over."""
        new = [path for path in paths if path in self.known and path not in self.sound]
        parallel(lambda path: check_shard(self.store, self.known[path]), new, _THREADS)
        self.sound.update(new)


def check_shard(store: Store, shard: ShardRef) -> None:
    """StoreError, with the file's name, if the shard is not there or not what was written, as far as this can tell."""
    if shard.bytes <= WHOLE_BYTES:
        verified(store, shard.path, shard.sha256)
        return
    size = store.size(shard.path)
    if size != shard.bytes:
        raise _damaged(store, shard, f"its {size} bytes are not the {shard.bytes} that were recorded for it")
    with open_file(store, shard.path) as file:
        if not footer_holds(file, size):
            raise _damaged(store, shard, "its footer does not have the SHA-256 that was written with it")


def _damaged(store: Store, shard: ShardRef, how: str) -> StoreError:
    return StoreError(
        f"{store.uri(shard.path)} is damaged: {how}. Restore this file from a backup; every other file is unharmed."
    )


@dataclass(frozen=True)
class CheckedScan:
    """What DuckDB takes for a scanner: the fragments that the filter leaves, some at a time, looked at before."""

    dataset: ds.Dataset
    filter: ds.Expression | None
    options: dict[str, Any]
    check: Callable[[Sequence[str]], None]

    def to_reader(self) -> pa.RecordBatchReader:
        """The batches as a stream. Whoever stops early has looked at few files."""
        return pa.RecordBatchReader.from_batches(self._scanner([]).projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        left = list(self.dataset.get_fragments(self.filter))
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            self.check([fragment.path for fragment in some])
            yield from self._scanner(some).to_reader()

    def _scanner(self, fragments: Sequence[Any]) -> ds.Scanner:
        part = ds.FileSystemDataset(fragments, self.dataset.schema, self.dataset.format, self.dataset.filesystem)
        return part.scanner(filter=self.filter, **self.options)
