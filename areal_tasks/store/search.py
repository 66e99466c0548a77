"""Finding the end of a numbered sequence without listing it, and detecting records that a run has lost.

Numbered records are found by reading them one by one, so a missing one looks like the end, and a start of the flow
would continue there and contradict the records that follow. So later numbers are checked before a start writes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from functools import partial
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError

_AHEAD: Final = (2, 3, 5, 9, 17, 33, 65)  # distances beyond the end at which no record should exist


def last_present(present: Callable[[int], bool], first: int) -> int:
    """The last number from `first` on that is present, or `first - 1`; numbers are present without gaps.

    Gallops, then bisects: O(log n) calls of `present`.
    """
    step = 1
    while present(first + step - 1):
        step *= 2
    known = range(first + step // 2, first + step - 1)  # the one before is present (or first - 1), the one after is not
    return known.start - 1 + bisect(known, False, key=lambda n: not present(n))


def last_number(store: Store, path: Callable[[int], str], first: int = 1) -> int:
    """The last number from `first` on whose record exists, or `first - 1`; O(log n) requests and no listing."""
    return last_present(lambda n: store.exists(path(n)), first)


def last_owner(store: Store, run: str) -> int:
    """The number of the last start of a run's flow; 0: there was none."""
    return last_number(store, partial(paths.owner, run))


def checked_last_number(store: Store, path: Callable[[int], str], first: int) -> int:
    """The last number from `first` on whose record exists; StoreError if there are some beyond a gap."""
    last = last_number(store, path, first)
    beyond = any(store.exists(path(last + ahead)) for ahead in _AHEAD)
    if beyond and not store.exists(path(last + 1)):  # else another start has just written it
        raise missing_before(store, path(last + 1))
    return last


def missing_before(store: Store, path: str) -> StoreError:
    """The error for a record that is missing although later ones exist."""
    return StoreError(
        f"{store.uri(path)} is missing, and what was written after it is there. Restore this file from a backup; "
        "nothing was changed."
    )
