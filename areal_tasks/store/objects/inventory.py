"""Files of the store for `audit`, `gc` and SQL: listing, removing, hashing and verifying them.

Other readers go through manifests and list nothing.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyarrow.fs import FileSelector, FileType

from areal_tasks.store.backend import Missing, Store, StoreError, damaged
from areal_tasks.store.commit import verified
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import footer_holds
from schemas.errors import first_line
from schemas.manifest import FileRef

_PIECE: Final = 4 << 20
#: Called with the size of each piece that was read.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Entry:
    """A file of the store: its path below the root, size, and when it was last written, by the store's own clock."""

    path: str
    bytes: int
    modified: float


def entries(store: Store, prefix: str) -> list[Entry]:
    """All files below the folder `prefix`, hidden ones too, sorted; empty if there is none."""
    filesystem, root = store.arrow()
    with _errors(store, prefix):
        found = filesystem.get_file_info(FileSelector(f"{root}/{prefix}", recursive=True, allow_not_found=True))
    files = (info for info in found if info.type == FileType.File)
    return sorted(
        (Entry(info.path.removeprefix(f"{root}/"), info.size, info.mtime_ns / 1e9) for info in files),
        key=lambda entry: entry.path,
    )


def store_time(store: Store) -> float:
    """The time by the store's clock, in seconds since 1970, to compare with its files' times."""
    probe = f".clock-{uuid.uuid4().hex}"
    store.put(probe, b"")
    filesystem, root = store.arrow()
    try:
        with _errors(store, probe):
            return float(filesystem.get_file_info(f"{root}/{probe}").mtime_ns) / 1e9
    finally:
        store.remove(probe)


def file_digest(store: Store, path: str, progress: Progress = lambda read: None) -> tuple[str, int]:
    """SHA-256, in hex, and length of a file of any size. Or `Missing`."""
    filesystem, root = store.arrow()
    digest, total = hashlib.sha256(), 0
    with _errors(store, path), filesystem.open_input_stream(f"{root}/{path}") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            total += len(piece)
            progress(len(piece))
    return digest.hexdigest(), total


@contextmanager
def open_file(store: Store, path: str) -> Iterator[pa.NativeFile]:
    """Open a file to read parts of it. Or `Missing`."""
    filesystem, root = store.arrow()
    with _errors(store, path), filesystem.open_input_file(f"{root}/{path}") as file:
        yield file


@contextmanager
def _errors(store: Store, path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Missing(store.uri(path)) from error
    except OSError as error:
        raise StoreError(
            f"{store.uri(path)} cannot be read: {first_line(error)[:200]}. Fix the cause, then run again."
        ) from error


def remove(store: Store, paths: Sequence[str]) -> None:
    """Remove files permanently; missing ones are no error. Attempts' folders that become empty are removed too."""
    parallel(store.remove, paths)


def remove_folders(store: Store, prefix: str) -> None:
    """Remove `prefix` and the folders below it where empty, of a run that no process writes any more."""
    if store.local(prefix) is None:
        return  # an object store has no folders
    for folder, _, _ in os.walk(store.uri(prefix), topdown=False):
        with suppress(OSError):  # not empty
            os.rmdir(folder)


# ── verifying ───────────────────────────────────────────────────────────────────────────────────────────────────────
#
# The SHA-256 of a file covers only the whole of it. Of shards and merged tables SQL reads only parts, so a small one is
# read whole, in one request, and hashed; of a large one the length and the footer's checksum are verified, and Arrow
# verifies the checksum of each page that it decodes (`scan.py`). A large one without such checksums, which
# earlier versions wrote, is hashed once before its scan.


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
    check_size(store, file)
    with open_file(store, file.path) as opened:
        if footer_holds(opened, file.bytes):
            return
    check_sha256(store, file)


def check_size(store: Store, file: FileRef) -> None:
    """StoreError, with the file's name, if it is missing or has another length than recorded."""
    if (size := store.size(file.path)) != file.bytes:
        raise damaged(store, file.path, f"its {size} bytes are not the {file.bytes} that were recorded for it")


def check_sha256(store: Store, file: FileRef, progress: Progress = lambda read: None) -> None:
    """StoreError, with the file's name, unless all its bytes are those that were recorded."""
    expected = (file.sha256, file.bytes)
    if not any(file_digest(store, file.path, progress) == expected for _ in range(2)):  # it may be corrupted in transit
        raise damaged(store, file.path, "its bytes do not have the SHA-256 that was recorded for it")
