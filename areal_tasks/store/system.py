"""Samples of a run's services in the store: the flow appends them, SQL, the report and `arealflow top` read them.

Each start of the flow writes numbered files of rows, each with a record, both created once. It writes more often while
a user watches, for which `arealflow top` writes numbered records too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from areal_tasks.store import paths
from areal_tasks.store.backend import Exists, Store
from areal_tasks.store.commit import checked_last_number, last_number, last_owner, read_record, verified
from areal_tasks.store.history.journal import current_user
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import encode, shard_ref
from schemas.manifest import SystemRecord, WatchRecord
from schemas.views import SYSTEM

Row = dict[str, Any]
#: Rows in memory while the store is unavailable; beyond that, the oldest are dropped.
MOST_ROWS: Final = 50_000


class SystemLog:
    """The samples that one start of the flow writes. Use within one thread."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rows: list[Row] = []
        self._unanswered: tuple[bytes, bytes] | None = None  # may be in the store: no others may have their number
        self._written = 0
        self._watches = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows, which `write` stores."""
        self._rows = [*self._rows, *rows][-MOST_ROWS:]

    def write(self) -> None:
        """Store all rows. If it raises StoreError, the next call stores them."""
        while self._unanswered or self._rows:
            n = self._written + 1
            self._unanswered = self._unanswered or self._encoded(n)
            for kind, data in zip(("parquet", "json"), self._unanswered, strict=True):
                with suppress(Exists):  # it was stored, and the answer was lost
                    self.run.store.create(paths.system(self.run.name, self.run.owner, n, kind), data)
            self._unanswered, self._written = None, n

    def _encoded(self, n: int) -> tuple[bytes, bytes]:
        began, owner, table = now(), self.run.owner, pa.Table.from_pylist(self._rows, schema=SYSTEM)
        data, self._rows = encode(table), []
        shard = shard_ref(paths.system(self.run.name, owner, n, "parquet"), data, table)
        record = SystemRecord(owner=owner, n=n, shard=shard, provenance=make_provenance(owner, began))
        return data, record.encode(paths.system(self.run.name, owner, n))

    def newly_watched(self) -> bool:
        """Whether a user has begun to watch since the last call. Raises StoreError."""
        before = self._watches
        while self.run.store.exists(paths.watch(self.run.name, self.run.owner, self._watches + 1)):
            self._watches += 1
        return self._watches > before


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def newest_record(run: Run, owner: int, known: int = 0) -> int:
    """The number of the last record of a start, at least `known`; 0: there is none."""
    return last_number(run.store, partial(paths.system, run.name, owner), known + 1)


def read_samples(run: Run, owner: int, n: int) -> pa.Table:
    """The rows of a record. Raises UserError if they are damaged."""
    record = read_record(run.store, paths.system(run.name, owner, n), SystemRecord)
    return pq.read_table(pa.BufferReader(verified(run.store, record.shard.path, record.shard.sha256))).cast(SYSTEM)


def system_table(run: Run) -> pa.Table:
    """The rows of the view `system`: of this run, not of its parents."""
    owners = range(1, last_owner(run.store, run.name) + 1)
    lasts = parallel(lambda owner: checked_last_number(run.store, partial(paths.system, run.name, owner)), owners)
    places = [(owner, n) for owner, last in zip(owners, lasts, strict=True) for n in range(1, last + 1)]
    return pa.concat_tables([SYSTEM.empty_table(), *parallel(lambda place: read_samples(run, *place), places)])


def watch(store: Store, run: str, owner: int) -> None:
    """Request that this start of the flow stores its samples immediately, for a while."""
    record = WatchRecord(user=current_user(), provenance=make_provenance(owner, now()))
    path = paths.watch(run, owner, last_number(store, partial(paths.watch, run, owner)) + 1)
    with suppress(Exists):  # another user watches since just now
        store.create(path, record.encode(path))
