"""Tables as Arrow scans them for SQL: lazy data sets, whose files are verified and opened once a scan has named its
columns and rows.

Not imported by what only opens a run: `pyarrow.dataset` imports pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.objects.inventory import check_file, check_sha256, is_small
from areal_tasks.store.parallel import parallel
from schemas.compaction import CompactFile
from schemas.manifest import FileRef
from schemas.tables import REPEATED, TABLES

if TYPE_CHECKING:
    from areal_tasks.store.catalog import Catalog, Region

#: Reads texts that repeat as dictionaries: DuckDB groups and filters them several times faster.
FORMAT: Final = ds.ParquetFileFormat(
    dictionary_columns=sorted(REPEATED),
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
)
#: As much of a table's small files stays in memory for the next query of a session.
KEPT_BYTES: Final = 32 << 20
_THREADS: Final = 32  # they wait for the network
#: Files that are checked before the first of them is scanned; small ones are then in memory.
_AT_ONCE: Final = 64
_WIDE: Final = 1 << 10  # in bits: a text or a list
_WORD: Final = pa.dictionary(pa.int32(), pa.string())  # DuckDB treats it as text
_ITERATION: Final = pa.field("iteration", pa.int32(), nullable=False)


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


# ── data sets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CheckedScan:
    """A scanner for DuckDB: the fragments that may match the filter, checked and scanned some at a time.

    `recording` keeps the error that ends the scan: DuckDB reports only that some scan has failed.
    """

    dataset: ds.Dataset
    filter: ds.Expression | None
    options: dict[str, Any]
    files: CheckedFiles
    recording: Callable[[], AbstractContextManager[None]]

    def to_reader(self) -> pa.RecordBatchReader:
        """The batches as a stream. A reader that stops early has opened few files."""
        return pa.RecordBatchReader.from_batches(self._scanner([]).projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        names = self.options["columns"]
        extra = [] if names is None else extra_column(self.dataset.schema, names)
        with self.recording():
            left = list(self.dataset.get_fragments(self.filter))
            for start in range(0, len(left), _AT_ONCE):
                some = left[start : start + _AT_ONCE]
                try:
                    for batch in self._scanner(self.files(some), extra).to_reader():
                        yield batch.select(names) if extra else batch
                except (StoreError, pa.ArrowException, OSError) as error:
                    raise self.files.failed(some, error) from error

    def _scanner(self, fragments: Sequence[Any], extra: Sequence[str] = ()) -> ds.Scanner:
        part = ds.FileSystemDataset(fragments, self.dataset.schema, self.dataset.format, self.dataset.filesystem)
        columns = [*self.options["columns"], *extra] if extra else self.options["columns"]
        return part.scanner(filter=self.filter, **self.options | {"columns": columns})


class LazyDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """A data set that is made when DuckDB asks it for a scanner. An error is kept: DuckDB hides which scan failed."""

    def __init__(self, schema: pa.Schema, build: Callable[[], ds.Dataset], files: CheckedFiles | None = None) -> None:
        super().__init__(schema.empty_table())
        self.build = build
        self.files = files
        self.failure: Exception | None = None

    def scanner(self, columns: Any = None, filter: ds.Expression | None = None, **options: Any) -> ds.Scanner:
        """As `Dataset.scanner`, of the data set that `build` makes."""
        with self.recording():
            dataset = self.build()
            if self.files is None:
                return dataset.scanner(columns=columns, filter=filter, **options)
            return CheckedScan(dataset, filter, {"columns": columns, **options}, self.files, self.recording)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep an error of the block in `failure`."""
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


def extra_column(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """The narrowest other column, read together with the single column `names`; empty for several columns or none.

    No checksum covers the header of a page. Arrow skips a page whose header is damaged, and notices that rows are
    missing only if another column has more.
    """
    stored = [name for name in names if name != _ITERATION.name]  # shards lack the iteration
    others = [field for field in schema if field.name not in (*names, _ITERATION.name)]
    narrow = sorted(others, key=lambda field: field.type.bit_width if pa.types.is_primitive(field.type) else _WIDE)
    return [field.name for field in narrow[:1]] if names and len(stored) < 2 else []


def table_dataset(catalog: Catalog, table: str) -> LazyDataset:
    """A table of the run, from valid compactions where there are any, and from its shards elsewhere."""
    fields = (field for field in TABLES[table] if field.name != "iteration")
    schema = pa.schema([_ITERATION, *(f.with_type(_WORD) if f.name in REPEATED else f for f in fields)])
    files = CheckedFiles(catalog.run.store)
    filesystem, _ = catalog.run.store.arrow()
    shards: dict[int, list[Any]] = {}  # first iteration of a region -> its shards

    def fragments(region: Region) -> list[Any]:
        """The region's files: of its compaction, else its shards, which are looked up once."""
        merged = region.merged(table) if catalog.compacted else None
        if merged is not None:
            return [files.fragment(file) for file in merged]
        if region.first not in shards:
            found = catalog.shards(region, table)
            shards[region.first] = [files.fragment(shard, ds.field("iteration") == k) for k, shard in found]
        return shards[region.first]

    def build() -> ds.Dataset:
        parts = [part for region in catalog.regions for part in fragments(region)]
        return ds.FileSystemDataset(parts, schema, FORMAT, filesystem)

    return LazyDataset(schema, build, files)


def derived_dataset(schema: pa.Schema, make: Callable[[], pa.Table]) -> LazyDataset:
    """A table that `make` computes on the first scan."""
    return LazyDataset(schema, cache(lambda: ds.InMemoryDataset(make())))
