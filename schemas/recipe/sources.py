"""Classifies `data.source` by its text alone."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final, Literal
from urllib.parse import urlsplit

SUFFIXES: Final = (".jsonl", ".json", ".parquet")
_SECRETS: Final = ("key=", "token=", "secret=", "password=", "signature=", "credential=")
SPLIT: Final = "{split}"


def holds_credentials(url: str) -> bool:
    """Whether a URL carries a user, a password or a signature, which would end up in logs, records and forms."""
    parts = urlsplit(url)
    return "@" in parts.netloc or any(word in parts.query.lower() for word in _SECRETS)


def source_kind(source: str) -> Literal["sums", "file", "hub"]:
    """`sums`: `sums://…`; `file`: a path or URL by its suffix or scheme; `hub`: a `datasets` repository or folder."""
    if source.startswith("sums://"):
        return "sums"
    if "://" in source or PurePosixPath(source).suffix in SUFFIXES:
        return "file"
    return "hub"
