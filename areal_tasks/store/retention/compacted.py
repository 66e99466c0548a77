"""Which compactions a run has, and which of them are valid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import bytes_digest, read_record
from areal_tasks.store.runs import Run
from schemas.compaction import Compaction

_NAME: Final = re.compile(r"(\d{6,})-(\d{6,})-(\d{3,})-[0-9a-f]+\.json")  # of an attempt; formerly a digest


@dataclass(frozen=True)
class CompactionName:
    """A compaction as the name of its record describes it."""

    path: str
    first: int
    stop: int
    generation: int


def list_compactions(store: Store, run: str) -> list[CompactionName]:
    """The compactions in the run's folder. If the listing lacks some, queries only take longer."""
    matches = (_NAME.fullmatch(name) for name in store.children(paths.compactions(run)))
    return [CompactionName(f"{paths.compactions(run)}/{m[0]}", int(m[1]), int(m[2]), int(m[3])) for m in matches if m]


def valid_compactions(run: Run) -> list[Compaction]:
    """The largest valid compactions of the run's history, in order and without overlap.

    A parent's compactions count if they end no later than where the child begins.
    """
    found, covered = list[Compaction](), 0
    for candidate in _candidates(run):
        if candidate.first >= covered and (record := _valid(run, candidate)) is not None:
            found.append(record)
            covered = record.stop
    return found


def _candidates(run: Run) -> list[CompactionName]:
    """Compactions of this run and its parents, by first iteration, the longest first, then the newest."""
    own = list_compactions(run.store, run.name)
    inherited = [c for c in _candidates(run.parent) if c.stop <= run.first] if run.parent else []
    return sorted([*own, *inherited], key=lambda c: (c.first, -c.stop, c not in own, -c.generation))


def _valid(run: Run, name: CompactionName) -> Compaction | None:
    """The record, if its seal holds and its last commit is this run's; else None."""
    try:
        record = read_record(run.store, name.path, Compaction)
        last = bytes_digest(run.store, run.commit_path(record.stop - 1))
    except StoreError:  # damaged, of a newer schema, or removed since
        return None
    return record if (record.first, record.stop, record.last) == (name.first, name.stop, last) else None
