"""Commits: small JSON records that are created at most once. Their existence is the commit."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Final, TypeVar

from pydantic import ValidationError

from areal_tasks.store.backend import Exists, Missing, NewerSchema, Store, StoreError, damaged
from areal_tasks.store.parallel import parallel
from schemas.manifest import ClaimedRecord
from schemas.record import SCHEMA_VERSION, StoredRecord, is_sealed, seal_holds

R = TypeVar("R", bound=StoredRecord)
C = TypeVar("C", bound=ClaimedRecord)

_RESTORE: Final = "Restore this file from a backup; every other iteration is unharmed."


def new_attempt() -> str:
    """A name that no other attempt has."""
    return uuid.uuid4().hex[:16]


def commit_once(store: Store, path: str, record: C) -> tuple[C, bool]:
    """Create `record` at `path` unless there is one; returns the record there now, and whether it is this one.

    A put may be stored and still answer with an error, or be sent twice by a client that retries: whatever the
    answer, the attempt that is read back counts.

    Raises:
        StoreError: the put failed and nothing is there.
    """
    try:
        store.create(path, record.encode())
        return record, True
    except Exists:
        existing = decode(store, path, type(record), store.read(path))
    except StoreError as error:
        try:
            existing = decode(store, path, type(record), store.read(path))
        except StoreError:
            raise error from None  # the put's error is the cause
    return existing, existing.attempt == record.attempt


def append_record(store: Store, path: Callable[[int], str], n: int, make: Callable[[int], C]) -> C:
    """Commit `make(n)` as record n, or under the next number that no other writer has taken; returns it."""
    while not commit_once(store, path(n), record := make(n))[1]:
        n += 1
    return record


def read_record(store: Store, path: str, model: type[R]) -> R:
    """The record at `path`.

    Raises:
        Missing: there is none.
        UserError: it is damaged, or was written by a newer version of this program.
    """
    return read_with_digest(store, path, model)[0]


def read_with_digest(store: Store, path: str, model: type[R]) -> tuple[R, str]:
    """The record at `path`, and the SHA-256 of its bytes, in hex. Errors as of `read_record`."""
    data = store.read(path)
    try:
        record = decode(store, path, model, data)
    except StoreError:  # it may have been corrupted in transit
        data = store.read(path)
        record = decode(store, path, model, data)
    return record, hashlib.sha256(data).hexdigest()


def find_record(store: Store, path: str, model: type[R]) -> R | None:
    """As `read_record`, but None when there is none."""
    try:
        return read_record(store, path, model)
    except Missing:
        return None


def read_folder(store: Store, folder: str, model: type[R]) -> list[R]:
    """The records directly in `folder`, by name; a record that has just been created may be missing."""
    names = [name for name in store.children(folder) if name.endswith(".json")]
    return parallel(lambda name: read_record(store, f"{folder}/{name}", model), names)


def read_verified(store: Store, path: str, sha256: str, model: type[R]) -> R:
    """The record at `path`, whose bytes have the SHA-256 that another record gives; else a UserError naming it."""
    return decode(store, path, model, verified(store, path, sha256))


def verified(store: Store, path: str, sha256: str) -> bytes:
    """The bytes at `path`, which must have this SHA-256; else a UserError that names the file."""
    data = store.read(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        data = store.read(path)  # it may have been corrupted in transit
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(store, path, f"its {len(data)} bytes do not have the SHA-256 that was recorded for it")
    return data


def bytes_digest(store: Store, path: str) -> str:
    """SHA-256 of the bytes at `path`, in hex."""
    return hashlib.sha256(store.read(path)).hexdigest()


def decode(store: Store, path: str, model: type[R], data: bytes) -> R:
    """The record that `data`, read from `path`, holds; a UserError that names the file if it holds none."""
    try:
        record = model.parse(data)
    except ValidationError as error:
        if (version := _schema_version(data)) > SCHEMA_VERSION:
            raise NewerSchema(store.uri(path), version, SCHEMA_VERSION) from error
        raise StoreError(_explain(store.uri(path), error)) from error
    if record.schema_version > SCHEMA_VERSION:  # its fields may be the same and mean something else
        raise NewerSchema(store.uri(path), record.schema_version, SCHEMA_VERSION)
    if (is_sealed(data) or record.schema_version > 1) and not seal_holds(data):
        raise StoreError(f"{store.uri(path)} is damaged (its seal does not hold): bytes were altered. {_RESTORE}")
    return record


def _explain(where: str, error: ValidationError) -> str:
    first = error.errors()[0]
    cause = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".lstrip(": ")
    return f"{where} is damaged ({cause}). {_RESTORE}"


def _schema_version(data: bytes) -> int:
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, TypeError, KeyError):
        return 0
    return version if isinstance(version, int) else 0
