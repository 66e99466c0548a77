"""Verifying Parquet files of which SQL reads only parts: shards and merged tables.

The SHA-256 of a file covers only the whole of it. So a small one is read whole, in one request, hashed and scanned
from memory; of a large one the length and the footer's checksum are verified, and Arrow verifies the checksum of each
page that it decodes. A large one without such checksums, which earlier versions wrote, is hashed once before its scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.objects.inventory import file_digest, open_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import footer_holds
from schemas.manifest import FileRef
from schemas.tables import REPEATED

#: Reads texts that repeat as dictionaries: DuckDB groups and filters them several times faster.
FORMAT: Final = ds.ParquetFileFormat(
    dictionary_columns=sorted(REPEATED),
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
)
#: Hashing that many bytes takes about as long as opening one Parquet file, half a millisecond.
WHOLE_BYTES: Final = 1 << 20
#: As much of a table's small files stays in memory for the next query of a session.
KEPT_BYTES: Final = 32 << 20
_THREADS: Final = 32  # they wait for the network


@dataclass
class CheckedFiles:
    """The files of a table as a scan takes them: small ones from memory, once their bytes are verified."""

    store: Store
    known: dict[str, FileRef] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # by path, what to scan; small files only while there is room
    room: int = KEPT_BYTES

    def fragment(self, file: FileRef, partition: ds.Expression | None = None) -> Any:
        """The file, not yet checked, for a data set; `partition` holds for all its rows."""
        filesystem, root = self.store.arrow()
        path = f"{root}/{file.path}"
        self.known[path] = file
        return FORMAT.make_fragment(path, filesystem, partition)

    def __call__(self, fragments: Sequence[Any]) -> list[Any]:
        """The fragments to scan in place of `fragments`; one that is no known file stays as it is.

        Raises:
            StoreError: one of them is not what its manifest names.
        """
        return parallel(self._checked, fragments, _THREADS)

    def _checked(self, fragment: Any) -> Any:
        path, file = fragment.path, self.known.get(fragment.path)
        if file is None or path in self.kept:
            return self.kept.get(path, fragment)
        if file.bytes > WHOLE_BYTES:
            check_file(self.store, file)
            return self.kept.setdefault(path, fragment)
        data = pa.py_buffer(verified(self.store, file.path, file.sha256))
        found = fragment.format.make_fragment(data, partition_expression=fragment.partition_expression)
        if file.bytes <= self.room:
            self.room -= file.bytes
            self.kept[path] = found
        return found


def read_file(store: Store, file: FileRef, schema: pa.Schema, filter: ds.Expression | None = None) -> pa.Table:
    """The rows that `filter` leaves, once every byte is verified; StoreError if the file is missing or damaged."""
    data = pa.py_buffer(verified(store, file.path, file.sha256))
    return FORMAT.make_fragment(data).to_table(schema=schema, columns=schema.names, filter=filter)


def check_file(store: Store, file: FileRef) -> None:
    """StoreError, with the file's name, if it is missing or altered; of a large one, length and footer count."""
    if file.bytes <= WHOLE_BYTES:
        verified(store, file.path, file.sha256)
        return
    size = store.size(file.path)
    if size != file.bytes:
        raise _damaged(store, file, f"its {size} bytes are not the {file.bytes} that were recorded for it")
    with open_file(store, file.path) as opened:
        if footer_holds(opened, size):
            return
    check_whole(store, file)


def check_whole(store: Store, file: FileRef) -> None:
    """StoreError, with the file's name, unless all its bytes are those that were recorded."""
    expected = (file.sha256, file.bytes)
    if not any(file_digest(store, file.path) == expected for _ in range(2)):  # it may be corrupted in transit
        raise _damaged(store, file, "its bytes do not have the SHA-256 that was recorded for it")


def _damaged(store: Store, file: FileRef, how: str) -> StoreError:
    return StoreError(
        f"{store.uri(file.path)} is damaged: {how}. Restore this file from a backup; every other file is unharmed."
    )
