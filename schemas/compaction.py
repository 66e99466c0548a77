"""The record of a compaction: tables of many iterations merged into few files, derived from commits that it names."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from schemas.manifest import FileRef, Provenance, Record, StoredRecord

#: The tables that are merged unless more are asked for: rows of scalars, no texts and no tokens.
SCALAR_TABLES: Final = ("scalars", "train_steps", "train_samples", "publish")


class CompactFile(FileRef):
    """A Parquet file whose parts can be verified one by one, so that a reader of few columns hashes few bytes."""

    rows: int
    footer: int = Field(description="bytes of the Parquet footer, its length and magic included")
    footer_sha256: str
    chunks: tuple[tuple[str, ...], ...] = Field(
        description="for each row group, of each column chunk in the footer's order: first half of its SHA-256"
    )


class CompactTable(Record):
    """A table's rows of all iterations of the range, in order."""

    columns: tuple[str, ...] = Field(description="a reader whose own schema has other columns uses the plain shards")
    files: tuple[CompactFile, ...]


class Compaction(StoredRecord):
    """`compact/<first>-<stop>-<generation>-<digest>.json`: derived tables of the iterations `first` to `stop` - 1.

    The name carries the first half of the SHA-256 of the bytes; of the same range, the last generation counts.
    `last` is the SHA-256 of the commit of iteration `stop` - 1; commits are a hash chain, so it names all of them.
    Tables: copies of the run's own, and `commits`, `stages` and `shards`, which save reading commits and manifests.
    """

    run: str
    first: int
    stop: int
    attempt: str
    last: str
    stages_of: dict[str, tuple[str, ...]] = Field(description="table -> the stages of the range that write it")
    tables: dict[str, CompactTable]
    provenance: Provenance
