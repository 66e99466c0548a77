"""The record of a compaction: tables of many iterations merged into few files, derived from the commits it names."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, model_validator

from schemas.manifest import FileRef, Provenance, Record, StoredRecord

#: The tables that are merged by default: scalars only, no texts and no tokens.
SCALAR_TABLES: Final = ("scalars", "train_steps", "train_samples", "publish")


#: Digests of parts of a file, which earlier versions recorded.
_FORMER: Final = frozenset({"footer", "footer_sha256", "chunks"})


class CompactFile(FileRef):
    """A Parquet file of a merged table."""

    rows: int

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if k not in _FORMER} if isinstance(value, dict) else value


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
