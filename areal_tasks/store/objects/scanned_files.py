"""The Parquet files of a table as Arrow scans them for SQL: verified, small ones from memory.

Not imported by what only opens a run: `pyarrow.dataset` imports pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.objects.inventory import check_file, check_sha256, is_small
from areal_tasks.store.parallel import parallel
from schemas.compaction import CompactFile
from schemas.manifest import FileRef
from schemas.tables import REPEATED

#: Reads texts that repeat as dictionaries: DuckDB groups and filters them several times faster.
FORMAT: Final = ds.ParquetFileFormat(
    dictionary_columns=sorted(REPEATED),
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
)
#: As much of a table's small files stays in memory for the next query of a session.
KEPT_BYTES: Final = 32 << 20
_THREADS: Final = 32  # they wait for the network


class DamagedCopy(StoreError):
    """A merged file is missing or damaged; its rows are in its source files, too."""


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

        Raises StoreError: one of them is not what its manifest names.
        """
        return parallel(self._checked, fragments, _THREADS)

    def failed(self, fragments: Sequence[Any], error: Exception) -> Exception:
        """Why these fragments could not be scanned: the first of their files that is damaged, else `error`."""
        files = [self.known[fragment.path] for fragment in fragments if fragment.path in self.known]
        if (named := isinstance(error, StoreError)) and not any(isinstance(file, CompactFile) for file in files):
            return error
        for file in files:
            try:
                check_sha256(self.store, file)
            except StoreError as damage:
                if isinstance(file, CompactFile):
                    return DamagedCopy(str(damage))
                return error if named else damage
        return error

    def _checked(self, fragment: Any) -> Any:
        path, file = fragment.path, self.known.get(fragment.path)
        if file is None or path in self.kept:
            return self.kept.get(path, fragment)
        if not is_small(file):
            check_file(self.store, file)
            return self.kept.setdefault(path, fragment)
        data = pa.py_buffer(verified(self.store, file.path, file.sha256))
        found = fragment.format.make_fragment(data, partition_expression=fragment.partition_expression)
        if file.bytes <= self.room:
            self.room -= file.bytes
            self.kept[path] = found
        return found


def read_file(store: Store, file: FileRef, schema: pa.Schema, filter: ds.Expression | None) -> pa.Table:
    """The rows that `filter` leaves, once every byte is verified; StoreError if the file is missing or damaged."""
    data = pa.py_buffer(verified(store, file.path, file.sha256))
    return FORMAT.make_fragment(data).to_table(schema=schema, columns=schema.names, filter=filter)
