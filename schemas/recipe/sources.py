"""What kind of thing `data.source` names, told from its spelling alone."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final, Literal

SUFFIXES: Final = (".jsonl", ".json", ".parquet")
SPLIT: Final = "{split}"


def source_kind(source: str) -> Literal["sums", "file", "hub"]:
    """`sums://…`; a file or object URL by its suffix or scheme; else the name or folder of a `datasets` repository."""
    if source.startswith("sums://"):
        return "sums"
    if "://" in source or PurePosixPath(source).suffix in SUFFIXES:
        return "file"
    return "hub"
