"""Verifying Parquet files of which SQL reads only parts: shards and merged tables.

The SHA-256 of a file covers only the whole of it. So a small one is read whole, in one request, and hashed; of a large
one the length and the footer's checksum are verified, and Arrow verifies the checksum of each page that it decodes
(`scanned_files.py`). A large one without such checksums, which earlier versions wrote, is hashed once before its scan.
"""

from __future__ import annotations

from typing import Final

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.objects.inventory import file_digest, open_file
from areal_tasks.store.shards import footer_holds
from schemas.manifest import FileRef

#: Hashing that many bytes takes about as long as opening one Parquet file, half a millisecond.
WHOLE_BYTES: Final = 1 << 20


def is_small(file: FileRef) -> bool:
    """Whether the file is read whole, and so verified by its SHA-256."""
    return file.bytes <= WHOLE_BYTES


def check_file(store: Store, file: FileRef) -> None:
    """StoreError, with the file's name, if it is missing or altered; of a large one, length and footer count."""
    if is_small(file):
        verified(store, file.path, file.sha256)
        return
    size = store.size(file.path)
    if size != file.bytes:
        raise _damaged(store, file, f"its {size} bytes are not the {file.bytes} that were recorded for it")
    with open_file(store, file.path) as opened:
        if footer_holds(opened, size):
            return
    check_whole(store, file)


def check_whole(store: Store, file: FileRef) -> None:
    """StoreError, with the file's name, unless all its bytes are those that were recorded."""
    expected = (file.sha256, file.bytes)
    if not any(file_digest(store, file.path) == expected for _ in range(2)):  # it may be corrupted in transit
        raise _damaged(store, file, "its bytes do not have the SHA-256 that was recorded for it")


def _damaged(store: Store, file: FileRef, how: str) -> StoreError:
    return StoreError(
        f"{store.uri(file.path)} is damaged: {how}. Restore this file from a backup; every other file is unharmed."
    )
