"""Reading compactions: which are valid, and their files, of which nothing is decoded before it is verified."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import bytes_digest, decode
from areal_tasks.store.parallel import parallel
from areal_tasks.store.runs import Run
from schemas.compaction import CompactFile, Compaction, CompactTable
from schemas.tables import REPEATED

#: Reads texts that repeat as dictionaries: DuckDB groups and filters them several times faster.
FORMAT: Final = ds.ParquetFileFormat(
    dictionary_columns=sorted(REPEATED),
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
)
DIGEST: Final = 32  # hex digits of the SHA-256 that a name or a chunk carries
_NAME: Final = re.compile(rf"(\d{{6,}})-(\d{{6,}})-(\d{{3,}})-([0-9a-f]{{{DIGEST}}})\.json")


class CompactionDamaged(Exception):
    """A compaction's file is damaged or cannot be read: read the source files instead."""


def short_digest(data: bytes | memoryview) -> str:
    """The first half of the SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]


# ── which compactions there are ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Named:
    """A compaction as the name of its manifest describes it."""

    run: str
    first: int
    stop: int
    generation: int
    digest: str

    @property
    def path(self) -> str:
        return paths.compaction(self.run, self.first, self.stop, self.generation, self.digest)


def listed(store: Store, run: str) -> list[Named]:
    """The compactions in the run's folder. If the listing lacks some, queries only take longer."""
    matches = (_NAME.fullmatch(name) for name in store.children(paths.compactions(run)))
    return [Named(run, int(m[1]), int(m[2]), int(m[3]), m[4]) for m in matches if m is not None]


def believed(run: Run) -> list[Compaction]:
    """The largest valid compactions of the run's history, in order and without overlap.

    A parent's compactions count if they end no later than where the child begins.
    """
    candidates, found, at = _candidates(run), list[Compaction](), 0
    while candidates := [c for c in candidates if c.first >= at]:
        at = candidates[0].first
        same_start = [c for c in candidates if c.first == at]
        taken = next((record for c in same_start if (record := _valid(run, c)) is not None), None)
        if taken is not None:
            found.append(taken)
        at = taken.stop if taken else at + 1
    return found


def _candidates(run: Run) -> list[Named]:
    """Compactions of this run and its parents, by first iteration, the longest first, then the newest."""
    own = listed(run.store, run.name)
    inherited = [c for c in _candidates(run.parent) if c.stop <= run.first] if run.parent else []
    return sorted([*own, *inherited], key=lambda c: (c.first, -c.stop, c.run != run.name, -c.generation))


def _valid(run: Run, name: Named) -> Compaction | None:
    """The record, if its bytes have the digest in its name and its last commit is this run's; else None."""
    try:
        data = run.store.read(name.path)
        if short_digest(data) != name.digest:
            return None
        record = decode(run.store, name.path, Compaction, data)
        if (record.run, record.first, record.stop) != (name.run, name.first, name.stop) or name.stop <= name.first:
            return None
        last = bytes_digest(run.store, run.commit_path(name.stop - 1))
    except StoreError:  # a newer schema, or removed since
        return None
    return record if record.last == last else None


# ── their files ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class VerifiedFile:
    """A buffer of a compacted file's size, in which only the requested parts are filled, once they are verified."""

    file: CompactFile
    read: Callable[[str, int, int], bytes]  # path, first byte, number of bytes
    memory: npt.NDArray[np.uint8] = field(init=False)
    fragment: Any = field(init=False)
    loaded: set[tuple[int, int]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.file.bytes, np.uint8)  # the kernel allocates pages when they are written
        start = self.file.bytes - self.file.footer
        footer = self.read(self.file.path, start, self.file.footer)
        if hashlib.sha256(footer).hexdigest() != self.file.footer_sha256:
            raise CompactionDamaged(f"the footer of {self.file.path} is damaged")
        self.memory[start:] = np.frombuffer(footer, np.uint8)
        self.fragment = FORMAT.make_fragment(pa.py_buffer(self.memory))

    def part(self, columns: Set[str], filter: ds.Expression | None, schema: pa.Schema) -> Any | None:
        """The row groups that `filter` leaves, with `columns` verified and in memory; None if there are none."""
        part = self.fragment if filter is None else self.fragment.subset(filter=filter, schema=schema)
        groups = [group.id for group in part.row_groups]
        wanted = [(g, c) for g in groups for c in self._columns(columns)]
        missing = [chunk for chunk in wanted if chunk not in self.loaded]
        parallel(self._load, missing)
        self.loaded.update(missing)
        return part if groups else None

    def _columns(self, names: Set[str]) -> list[int]:
        schema = self.fragment.metadata.schema
        return [i for i in range(len(schema)) if schema.column(i).path.split(".")[0] in names]

    def _load(self, chunk: tuple[int, int]) -> None:
        group, column = chunk
        start, size = extent(self.fragment.metadata.row_group(group).column(column))
        data = self.read(self.file.path, start, size)
        if short_digest(data) != self.file.chunks[group][column]:
            raise CompactionDamaged(f"{self.file.path} is damaged in bytes {start} to {start + size}")
        self.memory[start : start + size] = np.frombuffer(data, np.uint8)


def extent(chunk: Any) -> tuple[int, int]:
    """The first byte of a column chunk in its file, and its length, from the footer's metadata."""
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return start, chunk.total_compressed_size


def mentioned(names: Iterable[str], filter: ds.Expression | None) -> set[str]:
    """The `names` that occur in `filter`: its columns, and any that are also a word in a literal."""
    words = set(re.findall(r"\w+", str(filter))) if filter is not None else set()
    return words & set(names)


class CompactReader:
    """Reads compacted tables; verified parts stay in memory for the next query."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: dict[str, VerifiedFile] = {}

    def fragments(
        self, table: CompactTable, columns: Set[str], filter: ds.Expression | None, schema: pa.Schema
    ) -> list[Any]:
        """The parts of the table that may match `filter`, with `columns` and the filter's columns verified.

        Raises:
            CompactionDamaged: some of it is damaged or gone.
        """
        wanted = set(columns) | mentioned(schema.names, filter)
        parts = [self._kept(file).part(wanted, filter, schema) for file in table.files]
        return [part for part in parts if part is not None]

    def tables(self, table: CompactTable, schema: pa.Schema, filter: ds.Expression | None = None) -> Iterator[pa.Table]:
        """The rows that `filter` leaves, all columns of `schema`, file by file; nothing is cached.

        Raises:
            CompactionDamaged: as `fragments`.
        """
        for file in table.files:
            part = VerifiedFile(file, self._read).part(set(schema.names), filter, schema)
            if part is not None:
                yield part.to_table(schema=schema, columns=schema.names, filter=filter)

    def _kept(self, file: CompactFile) -> VerifiedFile:
        if file.path not in self.files:
            self.files[file.path] = VerifiedFile(file, self._read)
        return self.files[file.path]

    @cached_property
    def _place(self) -> tuple[Any, str]:
        return self.store.arrow()

    def _read(self, path: str, start: int, size: int) -> bytes:
        filesystem, root = self._place
        try:
            with filesystem.open_input_file(f"{root}/{path}") as file:
                data: bytes = file.read_at(size, start)
        except OSError as error:
            raise CompactionDamaged(f"{path} cannot be read: {error}") from error
        if len(data) != size:
            raise CompactionDamaged(f"{path} ends too early")
        return data
