"""Verifying shards of which SQL reads only parts.

The SHA-256 of a shard covers only the whole file. So a small one is read whole, in one request, hashed and scanned
from memory; of a large one the length and the footer's checksum are verified, and Arrow verifies the checksum of each
page that it decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.objects.inventory import open_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import footer_holds
from schemas.manifest import ShardRef

#: Hashing that many bytes takes about as long as opening one Parquet file, half a millisecond.
WHOLE_BYTES: Final = 1 << 20
#: As much of a table's small shards stays in memory for the next query of a session.
KEPT_BYTES: Final = 32 << 20
_THREADS: Final = 32  # they wait for the network


@dataclass
class CheckedShards:
    """The shards of a table as a scan takes them: small ones from memory, once their bytes are verified."""

    store: Store
    root: str  # of the store, in the file system that scans it
    known: dict[str, ShardRef] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # by path, what to scan; small shards only while there is room
    room: int = KEPT_BYTES

    def add(self, shard: ShardRef) -> str:
        """The path by which this shard will be scanned."""
        path = f"{self.root}/{shard.path}"
        self.known[path] = shard
        return path

    def __call__(self, fragments: Sequence[Any]) -> list[Any]:
        """The fragments to scan in place of `fragments`; one that is no known shard stays as it is.

        Raises:
            StoreError: one of them is not what its manifest names.
        """
        return parallel(self._checked, fragments, _THREADS)

    def _checked(self, fragment: Any) -> Any:
        path, shard = fragment.path, self.known.get(fragment.path)
        if shard is None or path in self.kept:
            return self.kept.get(path, fragment)
        if shard.bytes > WHOLE_BYTES:
            check_shard(self.store, shard)
            return self.kept.setdefault(path, fragment)
        data = pa.py_buffer(verified(self.store, shard.path, shard.sha256))
        found = fragment.format.make_fragment(data, partition_expression=fragment.partition_expression)
        if shard.bytes <= self.room:
            self.room -= shard.bytes
            self.kept[path] = found
        return found


def check_shard(store: Store, shard: ShardRef) -> None:
    """StoreError, with the file's name, if the shard is missing or altered; of a large one, length and footer count."""
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
