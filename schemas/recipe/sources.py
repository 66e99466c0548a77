"""What paths and URLs name, by their text alone. `#` and `?` are characters of a path, also in a URL."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

SUFFIXES: Final = (".jsonl", ".json", ".parquet")
_SECRETS: Final = ("key=", "token=", "secret=", "password=", "signature=", "credential=")
_FILE: Final = re.compile(r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.DOTALL)
_S3: Final = re.compile(r"s3://([\w.:-]+)(/.*)?", re.DOTALL)
SPLIT: Final = "{split}"


def holds_credentials(url: str) -> bool:
    """Whether a URL carries a user, a password or a signature, which would end up in logs, records and forms."""
    _, _, place = url.partition("://")
    if local_path(url) is not None:
        return False
    return "@" in re.split("[/?#]", place)[0] or any(word in place.partition("?")[2].lower() for word in _SECRETS)


def local_path(named: str) -> str | None:
    """The local path that a path or a URL `file:…` names; None for another URL. Only in a URL, `%20` is a blank."""
    if named.startswith(("/", "~", ".")) or not ("://" in named or named.startswith("file:")):
        return named
    found = _FILE.fullmatch(named)
    return os.fsdecode(unquote_to_bytes(os.fsencode(found[1]))) if found else None


def s3_place(url: str) -> tuple[str, str] | None:
    """The bucket and the prefix that a URL `s3://BUCKET/PREFIX` names; None for another one."""
    found = _S3.fullmatch(url)
    return (found[1], (found[2] or "").strip("/")) if found else None


def source_kind(source: str) -> Literal["sums", "file", "hub"]:
    """`sums`: `sums://…`; `file`: a path or URL by its suffix or scheme; `hub`: a `datasets` repository or folder."""
    if source.startswith("sums://"):
        return "sums"
    if "://" in source or PurePosixPath(source).suffix in SUFFIXES:
        return "file"
    return "hub"
