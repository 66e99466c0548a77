"""The spool: finished groups that wait in the store for their iteration, where they survive a crash of the flow.

A group that is taken soon is written once, with its iteration. One that has waited for `rollout.flush_seconds` is
written to the spool, where any worker and a later start of the flow can read it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.rollout.filters import kind_of
from areal_tasks.rollout.judging import judged_table
from areal_tasks.rollout.rejections import STALE
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.store import paths, spool
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.shards import read_table, write_table
from areal_tasks.workflows import Sample, samples_to_table
from schemas.manifest import RejectedGroup, SpooledGroup, SpoolRecord
from schemas.tables import TABLES

log = logging.getLogger(__name__)

#: The place of a record in the spool: the number of the worker start that wrote it, and its number within that.
Place = tuple[int, int]
NOTHING_SPOOLED: Final[Sequence[Place]] = [(0, 0)]


@dataclass
class Writer:
    """Writes the records of one start, which the first write opens unless `open` was called before.

    `made_with`: see `SpoolRecord`.
    """

    store: Store
    run: str
    owner: int
    made_with: str
    next: Place | None = None  # place of the next record; None before the start is opened

    def open(self) -> int:
        """Open the start. Returns its number."""
        start = spool.open_start(self.store, self.run, self.owner, self.made_with)
        self.next = (start, 1)
        return start

    def write(
        self, finished: Mapping[int, tuple[int, Sequence[Sample]]], rejected: Iterable[RejectedGroup] = ()
    ) -> list[SpoolRecord]:
        """Record groups, each with the version of its oldest token and its samples, and groups that were rejected.

        Returns the new record, preceded by earlier ones that the store accepted although their answers were lost.

        Raises:
            StartClosed: a later process has closed this start.
        """
        (start, n), attempt = self.next or (self.open(), 1), new_attempt()
        samples = [sample for _, group in finished.values() for sample in group]
        prefix = paths.spool_attempt(self.run, start, attempt)
        tables = {name: write_table(self.store, prefix, name, table) for name, table in tables_of(samples).items()}
        groups = tuple(_spooled(index, version, group) for index, (version, group) in finished.items())
        written: list[SpoolRecord] = []
        for place in count(n):  # a put whose answer was lost may have left an earlier attempt at this place
            record = spool.append_groups(
                self.store, self.run, start, place, self.owner, attempt=attempt, finished=groups,
                rejected=tuple(rejected), tables=tables,
            )  # fmt: skip
            self.next = (start, place + 1)
            written.append(record)
            if record.attempt == attempt:
                return written
        raise AssertionError("count ends")


@dataclass
class Spool:
    """The groups that wait in the store, from any worker start, and where a later start of the flow finds them.

    `first`: for each worker start, as of the last commit, the first record that may name an unsettled group. Starts
    below the lowest of these have none, and starts not listed are read from their beginning.
    """

    store: Store
    run: str
    owner: int
    made_with: str
    first: Sequence[Place] = tuple(NOTHING_SPOOLED)
    _held: dict[int, SpoolRecord] = field(default_factory=dict)  # groups whose rows are in the store
    _ends: dict[int, int] = field(default_factory=dict)  # per start: its first record not noted, or its last if closed
    _closed: set[int] = field(default_factory=set)

    def recover(self, settled: SettledGroups) -> tuple[dict[int, int], list[RejectedGroup]]:
        """Close all earlier starts. Returns the groups that wait in their records, and those that they rejected.

        Of a group that waits, it gives the version of the oldest token. A group that is recorded as stale had finished:
        it waits no more, and may be counted. Of any other that is in both, what finished is used.
        """
        waiting: dict[int, int] = {}
        rejected: dict[int, RejectedGroup] = {}  # each once: a record may repeat an earlier one, whose answer was lost
        self._ends, below = dict(self.first), self.first[0][0]
        self._closed.update(range(below))
        for start in range(below, spool.number_of_starts(self.store, self.run)):
            for record in self.close(start):
                rejected |= {group.index: group for group in record.rejected if group.index not in settled}
                unsettled = {group.index: group.version for group in record.finished if group.index not in settled}
                self.note(record, unsettled)
                waiting |= unsettled
        self.forget(stale := {index for index, group in rejected.items() if kind_of(group.reason) == STALE})
        waiting = {index: version for index, version in waiting.items() if index not in stale}
        return waiting, [group for index, group in rejected.items() if index not in waiting]

    def close(self, start: int) -> list[SpoolRecord]:
        """Close a start. Returns the records that are not noted, of which the last closes it.

        If its groups were made with other settings, this last one alone.
        """
        records = spool.close_start(self.store, self.run, start, self.owner, self._ends.get(start, 0))
        if spool.made_with(self.store, self.run, start) == self.made_with:
            return records
        if groups := sum(len(record.finished) for record in records):
            log.warning("%d groups in the spool were made with other settings: they begin again", groups)
        return records[-1:]

    def note(self, record: SpoolRecord, groups: Iterable[int]) -> None:
        """Note these groups of a record: they are not settled, and no worker holds them."""
        self._held |= dict.fromkeys(groups, record)
        if record.kind == "closed":
            self._closed.add(record.start)
        end = record.n + (record.kind != "closed")
        self._ends[record.start] = max(self._ends.get(record.start, 0), end)

    def records(self, indices: Iterable[int]) -> list[SpoolRecord]:
        """The records that hold rows of these groups, each once and with these groups alone.

        Two records may hold the same group: a worker that was considered lost may have recorded it, too.
        """
        places: dict[Place, list[int]] = {}
        for index in indices:
            if (record := self._held.get(index)) is not None:
                places.setdefault((record.start, record.n), []).append(index)
        return [narrowed(self._held[groups[0]], groups) for groups in places.values()]

    def forget(self, indices: Iterable[int]) -> None:
        """Forget these groups: they are settled, or begin again."""
        for index in indices:
            self._held.pop(index, None)

    def places(self) -> list[Place]:
        """The first record of each start that may name a group that is not settled; see `first`."""
        held: dict[int, int] = {}
        for record in self._held.values():
            held[record.start] = min(record.n, held.get(record.start, record.n))
        after = max([*self._ends, *self._closed], default=-1) + 1
        lowest = next(s for s in range(after + 1) if s in held or s not in self._closed)
        return [(s, held.get(s, self._ends.get(s, 0))) for s in range(lowest, after)] or [(lowest, 0)]


def tables_of(samples: Sequence[Sample]) -> dict[str, pa.Table]:
    """The tables of these samples: `rollout`, and `judged` if their verdicts decide. Empty without samples."""
    if not samples:
        return {}
    judged = {"judged": judged_table(samples)} if samples[0].judged_with else {}
    return {"rollout": samples_to_table(samples)} | judged


def narrowed(record: SpoolRecord, groups: Collection[int]) -> SpoolRecord:
    """A record with these of its finished groups only."""
    return record.model_copy(update={"finished": tuple(g for g in record.finished if g.index in groups)})


def spooled_rows(store: Store, records: Iterable[SpoolRecord], name: str) -> pa.Table:
    """The rows of the records' finished groups in the table `name`.

    Raises:
        SpoolDamaged: they cannot be read, although the store answers.
    """
    try:
        tables = [_rows_of(read_table(store, record.tables[name]), record) for record in records]
    except Unavailable:
        raise
    except StoreError as error:
        raise spool.SpoolDamaged(str(error)) from error
    return pa.concat_tables([TABLES[name].empty_table(), *tables])


def _rows_of(rows: pa.Table, record: SpoolRecord) -> pa.Table:
    groups = pa.array([group.index for group in record.finished], rows.schema.field("group_id").type)
    return rows.filter(pc.is_in(rows["group_id"], groups))


def _spooled(index: int, version: int, samples: Sequence[Sample]) -> SpooledGroup:
    tokens = sum(len(sample.generated_versions) for sample in samples)
    return SpooledGroup(index=index, version=version, samples=len(samples), tokens=tokens)
