"""What kind of thing `data.source` names, told from its spelling alone."""

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
    """`sums://…`; a file or object URL by its suffix or scheme; else the name or folder of a `datasets` repository."""
    if source.startswith("sums://"):
        return "sums"
    if "://" in source or PurePosixPath(source).suffix in SUFFIXES:
        return "file"
    return "hub"
