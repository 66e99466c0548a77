"""Which compactions a run has, and which of them are valid."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import bytes_digest, decode
from areal_tasks.store.runs import Run
from schemas.compaction import Compaction

DIGEST: Final = 32  # hex digits of the SHA-256 that a name carries
_NAME: Final = re.compile(rf"(\d{{6,}})-(\d{{6,}})-(\d{{3,}})-([0-9a-f]{{{DIGEST}}})\.json")


def short_digest(data: bytes) -> str:
    """The first half of the SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]


@dataclass(frozen=True)
class Named:
    """A compaction as the name of its manifest describes it."""

    run: str
    first: int
    stop: int
    generation: int
    digest: str

    @property
    def path(self) -> str:
        return paths.compaction(self.run, self.first, self.stop, self.generation, self.digest)


def listed(store: Store, run: str) -> list[Named]:
    """The compactions in the run's folder. If the listing lacks some, queries only take longer."""
    matches = (_NAME.fullmatch(name) for name in store.children(paths.compactions(run)))
    return [Named(run, int(m[1]), int(m[2]), int(m[3]), m[4]) for m in matches if m is not None]


def believed(run: Run) -> list[Compaction]:
    """The largest valid compactions of the run's history, in order and without overlap.

    A parent's compactions count if they end no later than where the child begins.
    """
    found, covered = list[Compaction](), 0
    for candidate in _candidates(run):
        if candidate.first >= covered and (record := _valid(run, candidate)) is not None:
            found.append(record)
            covered = record.stop
    return found


def _candidates(run: Run) -> list[Named]:
    """Compactions of this run and its parents, by first iteration, the longest first, then the newest."""
    own = listed(run.store, run.name)
    inherited = [c for c in _candidates(run.parent) if c.stop <= run.first] if run.parent else []
    return sorted([*own, *inherited], key=lambda c: (c.first, -c.stop, c.run != run.name, -c.generation))


def _valid(run: Run, name: Named) -> Compaction | None:
    """The record, if its bytes have the digest in its name and its last commit is this run's; else None."""
    try:
        data = run.store.read(name.path)
        if short_digest(data) != name.digest:
            return None
        record = decode(run.store, name.path, Compaction, data)
        if (record.run, record.first, record.stop) != (name.run, name.first, name.stop) or name.stop <= name.first:
            return None
        last = bytes_digest(run.store, run.commit_path(name.stop - 1))
    except StoreError:  # a newer schema, or removed since
        return None
    return record if record.last == last else None
