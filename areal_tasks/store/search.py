"""Finding the end of a numbered sequence without listing it, and detecting records that a run has lost.

Numbered records are found by reading them one by one, so a missing one looks like the end, and a start would continue
there, against the history that follows. Later records show that it is missing, before a start writes it a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import read_record
from schemas.manifest import IterationCommit, RunRecord

_AHEAD: Final = (2, 3, 5, 9, 17, 33, 65)  # distances beyond the end at which no record should exist


def last_present(present: Callable[[int], bool], first: int = 0) -> int:
    """The last number from `first` on that is present, or `first - 1`; numbers are present without gaps.

    Gallops, then bisects: O(log n) calls of `present`.
    """
    step = 1
    while present(first + step - 1):
        step *= 2
    low, high = first + step // 2 - 1, first + step - 1  # low is present (or first - 1), high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if present(middle) else (low, middle)
    return low


def check_gaps(store: Store, name: str, record: RunRecord | None, segments: int) -> None:
    """StoreError that names a missing record of the run, if others show that it existed. Changes nothing.

    `record` is its `run.json`, None if there is none; `segments` is the number of segments found.
    """
    if record is None:
        if any(store.exists(path) for path in (paths.owner(name, 1), paths.segment(name, 0))):
            raise _missing(store, paths.run_record(name))
        return
    last = _end(store, lambda k: paths.iteration_commit(name, k), record.parent_iteration)
    owner = _end(store, lambda n: paths.owner(name, n), 1)
    if last < record.parent_iteration:
        return
    head = read_record(store, paths.iteration_commit(name, last), IterationCommit)
    if head.segment >= segments:
        raise _missing(store, paths.segment(name, segments))
    if head.provenance.owner > owner:
        raise _missing(store, paths.owner(name, owner + 1))


def _end(store: Store, path: Callable[[int], str], first: int) -> int:
    """The last number from `first` on that exists; StoreError if there are some beyond a gap."""
    last = last_present(lambda n: store.exists(path(n)), first)
    beyond = any(store.exists(path(last + ahead)) for ahead in _AHEAD)
    if beyond and not store.exists(path(last + 1)):  # else another start has just written it
        raise _missing(store, path(last + 1))
    return last


def _missing(store: Store, path: str) -> StoreError:
    return StoreError(
        f"{store.uri(path)} is missing, and what was written after it is there. Restore this file from a backup; "
        "nothing was changed."
    )
