"""The spool: finished groups that wait for their iteration, and groups that were rejected, as records in the store.

Each process that records groups, a rollout worker or the flow, opens a *start*: its own sequence of records, numbered
from 0 and created once. Groups that a process has not recorded are lost when it ends. Starts are numbered without gaps
too, so that all records of a run are found without a listing.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import (
    append_record,
    checked_last_number,
    commit_once,
    every_record,
    last_number,
    new_attempt,
    read_record,
)
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import RejectedGroup, SpooledGroup, SpoolRecord, TableRef


class StartClosed(UserError):
    """Another process has replaced this one and closed its start: this process must end. Unrecorded groups are lost."""


class SpoolDamaged(StoreError):
    """Rows of groups in the spool are missing or damaged."""


def number_of_starts(store: Store, run: str) -> int:
    """The number of starts; O(log n) requests."""
    return last_number(store, lambda n: paths.spool_record(run, n, 0), 0) + 1


def open_start(store: Store, run: str, owner: int, made_with: str) -> int:
    """Claim the next start's number; its first record holds `made_with`, the digest of the settings of its groups."""
    first = number_of_starts(store, run)
    opened = append_record(
        store, lambda n: paths.spool_record(run, n, 0), first, lambda n: _record("opened", n, 0, owner, made_with)
    )
    return opened.start


def made_with(store: Store, run: str, start: int) -> str:
    """The digest of the settings with which the groups of a start are made."""
    return read_record(store, paths.spool_record(run, start, 0), SpoolRecord).made_with


def append_groups(
    store: Store,
    run: str,
    start: int,
    n: int,
    owner: int,
    *,
    attempt: str,
    finished: tuple[SpooledGroup, ...] = (),
    rejected: tuple[RejectedGroup, ...] = (),
    tables: dict[str, TableRef] | None = None,
) -> SpoolRecord:
    """Commit record `n` of a start, whose tables are stored below `attempt`. Only for the process that opened it.

    Returns the stored record: an earlier attempt's if the store had taken that and its answer was lost.

    Raises StartClosed: another process has closed this start.
    """
    record = _record("groups", start, n, owner).model_copy(
        update={"attempt": attempt, "finished": finished, "rejected": rejected, "tables": tables or {}}
    )
    existing, mine = commit_once(store, paths.spool_record(run, start, n), record)
    if not mine and existing.kind == "closed":
        raise StartClosed(f"start {start} of the spool of run {run!r} was ended by owner {existing.provenance.owner}")
    return existing


def read_start(store: Store, run: str, start: int, first: int = 0) -> list[SpoolRecord]:
    """The records of a start from number `first` on; StoreError if one is missing before the last."""
    return list(every_record(store, partial(paths.spool_record, run, start), first, SpoolRecord))


def read_spool(store: Store, run: str) -> list[SpoolRecord]:
    """All records of a run, in order; StoreError if one is missing before the last."""
    starts = range(checked_last_number(store, lambda n: paths.spool_record(run, n, 0), 0) + 1)
    lasts = parallel(lambda start: checked_last_number(store, partial(paths.spool_record, run, start), 0), starts)
    places = [(start, n) for start, end in enumerate(lasts) for n in range(end + 1)]
    return parallel(lambda place: read_record(store, paths.spool_record(run, *place), SpoolRecord), places)


def close_start(store: Store, run: str, start: int, owner: int, first: int = 0) -> list[SpoolRecord]:
    """Close a start, so that its process can add no record; returns its records from `first` on."""
    found = read_start(store, run, start, first)
    while not found or found[-1].kind != "closed":
        n = first + len(found)
        found.append(commit_once(store, paths.spool_record(run, start, n), _record("closed", start, n, owner))[0])
    return found


def _record(
    kind: Literal["opened", "groups", "closed"], start: int, n: int, owner: int, made_with: str = ""
) -> SpoolRecord:
    provenance = make_provenance(owner, now())
    return SpoolRecord(start=start, n=n, attempt=new_attempt(), kind=kind, made_with=made_with, provenance=provenance)
