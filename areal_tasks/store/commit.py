"""Commits: small JSON records that are created at most once. Their existence is the commit.

Numbered records are found by reading them one by one, without a listing. So a missing one looks like the end, and a
start of the flow would continue there and contradict the records that follow: later numbers are checked before a start
writes, and by readers of whole sequences (`checked_last_number`).
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from pydantic import ValidationError

from areal_tasks.store import paths
from areal_tasks.store.backend import Exists, Missing, NewerSchema, Store, StoreError, damaged
from areal_tasks.store.parallel import parallel
from schemas.manifest import ClaimedRecord
from schemas.record import SCHEMA_VERSION, StoredRecord

R = TypeVar("R", bound=StoredRecord)
C = TypeVar("C", bound=ClaimedRecord)

#: Distances beyond the end of a sequence at which a start looks for records, which should not exist.
AHEAD: Final = (2, 3, 5, 9, 17, 33, 65)
_RESTORE: Final = "Restore this file from a backup; every other iteration is unharmed."


def new_attempt() -> str:
    """A name that no other attempt has."""
    return uuid.uuid4().hex[:16]


def commit_once(store: Store, path: str, record: C) -> tuple[C, bool]:
    """Create `record` at `path` unless there is one; returns the record there now, and whether it is this one.

    A put may be stored and still answer with an error, or be sent twice by a client that retries: whatever the
    answer, the attempt that is read back counts.

    Raises StoreError: the put failed and nothing is there.
    """
    try:
        store.create(path, record.encode(path))
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


def read_record(store: Store, path: str, model: type[R], sha256: str | None = None) -> R:
    """The record at `path`; its bytes must have the SHA-256 that another record gives, if any.

    Raises:
        Missing: there is none.
        UserError: it is damaged, or was written by a newer version of this program.
    """
    if sha256 is not None:
        return decode(store, path, model, verified(store, path, sha256))
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
            raise NewerSchema(store.uri(path), version) from error
        first = error.errors()[0]
        cause = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".lstrip(": ")
        raise StoreError(f"{store.uri(path)} is damaged ({cause}). {_RESTORE}") from error
    if record.schema_version > SCHEMA_VERSION:  # its fields may be the same and mean something else
        raise NewerSchema(store.uri(path), record.schema_version)
    if not record.seal_holds(data, path):
        what = "bytes were altered, or it is a copy of another record"
        raise StoreError(f"{store.uri(path)} is damaged (its seal does not hold): {what}. {_RESTORE}")
    return record


def _schema_version(data: bytes) -> int:
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, TypeError, KeyError):
        return 0
    return version if isinstance(version, int) else 0


# ── numbered records ──────────────────────────────────────────────────────────────────────────────────────────────────


def last_present(present: Callable[[int], bool], first: int) -> int:
    """The last number from `first` on that is present, or `first - 1`; numbers are present without gaps.

    Gallops, then bisects: O(log n) calls of `present`.
    """
    step = 1
    while present(first + step - 1):
        step *= 2
    known = range(first + step // 2, first + step - 1)  # the one before is present (or first - 1), the one after is not
    return known.start - 1 + bisect(known, False, key=lambda n: not present(n))


def every_record(store: Store, path: Callable[[int], str], n: int, model: type[R]) -> Iterator[R]:
    """The records from number `n` on; StoreError at the end if one is missing before the last."""
    while (record := find_record(store, path(n), model)) is not None:
        yield record
        n += 1
    check_last(store, path, n - 1)


def last_number(store: Store, path: Callable[[int], str], first: int = 1) -> int:
    """The last number from `first` on whose record exists, or `first - 1`; O(log n) requests and no listing."""
    return last_present(lambda n: store.exists(path(n)), first)


def last_owner(store: Store, run: str) -> int:
    """The number of the last start of a run's flow; 0: there was none. As `checked_last_number`."""
    return checked_last_number(store, partial(paths.owner, run))


def check_owners(store: Store, run: str, last: int, named: Iterable[int]) -> None:
    """StoreError if records name starts of the flow after the `last`, of which the next has no record."""
    following = paths.owner(run, last + 1)
    if max(named, default=0) > last and not store.exists(following):  # else it has begun since `last` was found
        raise missing_before(store.uri(following))


def checked_last_number(store: Store, path: Callable[[int], str], first: int = 1, ahead: Sequence[int] = ()) -> int:
    """The last number from `first` on whose record exists; StoreError if there are some beyond a gap.

    These are looked for in a listing, and, since that may be old, by name at the distances `ahead`.
    """
    last = last_number(store, path, first)
    check_last(store, path, last, ahead)
    return last


def check_last(store: Store, path: Callable[[int], str], last: int, ahead: Sequence[int] = ()) -> None:
    """StoreError if `last`, found by name, is not the last number: see `checked_last_number`."""
    later = [*(last + n for n in ahead), *(n for n in listed_numbers(store, path) if n > last + 1)]
    if any(store.exists(path(n)) for n in later) and not store.exists(path(last + 1)):  # else it was just written
        raise missing_before(store.uri(path(last + 1)))


def listed_numbers(store: Store, path: Callable[[int], str]) -> list[int]:
    """The numbers n for which a listing shows `path(n)`, or the folder in it whose name is numbered."""
    one, two = (path(n).split("/") for n in (1, 2))
    depth = next(i for i, names in enumerate(zip(one, two, strict=True)) if names[0] != names[1])
    found = [(name, re.sub(r"\D", "", name)) for name in store.children("/".join(one[:depth]))]
    return [int(n) for name, n in found if n and path(int(n)).split("/")[depth] == name]


def missing_before(where: str) -> StoreError:
    """The error for a record that is missing, although others that were written after it exist."""
    return StoreError(
        f"{where} is missing, and what was written after it is there. Restore this file from a backup; "
        "nothing was changed."
    )
