"""The record of a compaction: tables of many iterations merged into few files, derived from the commits it names."""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict, Field

from schemas.manifest import FileRef, Provenance
from schemas.record import Record, StoredRecord

#: The tables that are merged by default: scalars only, no texts and no tokens.
SCALAR_TABLES: Final = ("scalars", "train_steps", "train_samples", "publish")


class CompactFile(FileRef):
    """A Parquet file of a merged table."""

    model_config = ConfigDict(extra="ignore")  # earlier versions recorded digests of parts of a file

    rows: int


class CompactTable(Record):
    """A table's rows of all iterations of the range, in iteration order."""

    columns: tuple[str, ...] = Field(description="a reader whose schema has other columns reads the original shards")
    files: tuple[CompactFile, ...]


class Compaction(StoredRecord):
    """`compact/<first>-<stop>-<generation>-<attempt>.json`: derived tables of the iterations `first` to `stop` - 1.

    The last generation of a range counts.
    `last` is the SHA-256 of the commit of iteration `stop` - 1; commits are a hash chain, so it identifies all of them.
    Tables: copies of the run's tables, and `commits`, `stages` and `shards`, which replace commits and manifests.
    """

    run: str
    first: int
    stop: int
    attempt: str
    last: str
    stages_of: dict[str, tuple[str, ...]] = Field(description="table -> the stages of the range that write it")
    tables: dict[str, CompactTable]
    provenance: Provenance
