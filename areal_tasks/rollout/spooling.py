"""Finished groups that wait for their iteration, in the store: they outlive the flow (DESIGN §9).

A group that is taken soon is written once, with its iteration. One that has waited for `rollout.flush_seconds` is in
the spool by then, and a later start of the flow finds it there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.rollout.judging import judged_table
from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.staleness import Finished
from areal_tasks.store import paths, spool
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table, write_table
from areal_tasks.workflows import Sample, samples_to_table
from schemas.manifest import RejectedGroup, SpooledGroup, SpoolRecord
from schemas.tables import TABLES

log = logging.getLogger(__name__)

#: A record: the number of its start, and its own.
Place = tuple[int, int]


@dataclass
class Spool:
    """What one start of the flow records, and what it found of earlier ones. `made_with`: see `SpoolRecord`.

    `first` is the first record that may speak of a group that is not settled, by the last commit.
    """

    run: Run
    made_with: str
    first: Place = (0, 0)
    next: Place | None = None  # where this start records what comes next; None: it has recorded nothing
    _held: dict[int, SpoolRecord] = field(default_factory=dict)  # groups whose rows are in the store
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def recover(self, settled: Settled) -> tuple[list[Finished], list[RejectedGroup]]:
        """End all earlier starts. Returns the groups that wait in their records, and those that they have rejected."""
        waiting: dict[int, Finished] = {}
        rejected: list[RejectedGroup] = []
        starts = spool.number_of_starts(self.run.store, self.run.name)
        for record in chain.from_iterable(map(self._records, range(self.first[0], starts))):
            rejected += [group for group in record.rejected if group.index not in settled]
            unsettled = [group for group in record.finished if group.index not in settled]
            self._held |= {group.index: record for group in unsettled}
            waiting |= {group.index: Finished(group.index, group.version) for group in unsettled}
        self.first = (starts, 0)
        return list(waiting.values()), [group for group in rejected if group.index not in waiting]

    def _records(self, start: int) -> list[SpoolRecord]:
        """What an earlier start has recorded that may not be settled; nothing if it was made with other settings."""
        store, name = self.run.store, self.run.name
        records = spool.close_start(store, name, start, self.run.owner, self.first[1] * (start == self.first[0]))
        if spool.made_with(store, name, start) == self.made_with:
            return records
        if groups := sum(len(record.finished) for record in records):
            log.warning("%d groups in the spool were made with other settings: they begin again", groups)
        return []

    def write(
        self, finished: Mapping[int, tuple[int, Sequence[Sample]]], rejected: Iterable[RejectedGroup] = ()
    ) -> None:
        """Record groups, each with the version of its oldest token and its samples, and groups that were rejected.

        Raises:
            StartClosed: a later start of the flow has taken over.
        """
        store, name = self.run.store, self.run.name
        if self.next is None:
            self.next = (spool.open_start(store, name, self.run.owner, self.made_with), 1)
        (start, n), attempt = self.next, new_attempt()
        samples = [sample for _, group in finished.values() for sample in group]
        prefix = paths.spool_attempt(name, start, attempt)
        tables = {name: write_table(store, prefix, name, table) for name, table in tables_of(samples).items()}
        groups = tuple(_spooled(index, version, group) for index, (version, group) in finished.items())
        for place in count(n):  # a put that was stored and not answered has left an earlier attempt at the same place
            record = spool.append(
                store, name, start, place, self.run.owner, attempt=attempt, finished=groups,
                rejected=tuple(rejected), tables=tables,
            )  # fmt: skip
            with self._lock:
                self._held |= {group.index: record for group in record.finished}
                self.next = (start, place + 1)
            if record.attempt == attempt:
                return

    def __contains__(self, index: int) -> bool:
        """Whether the store holds the rows of a finished group."""
        return index in self._held

    def read(self, indices: Iterable[int], name: str = "rollout") -> pa.Table:
        """The rows of these groups, which the store holds, of one of their tables."""
        wanted = set(indices)
        records = {(r.start, r.n): r for r in (self._held[index] for index in wanted)}
        tables = [read_table(self.run.store, record.tables[name]) for record in records.values()]
        rows = pa.concat_tables([TABLES[name].empty_table(), *tables])
        return rows.filter(pc.is_in(rows["group_id"], pa.array(sorted(wanted), rows.schema.field("group_id").type)))

    def forget(self, indices: Iterable[int]) -> None:
        """These groups are settled."""
        with self._lock:
            for index in indices:
                self._held.pop(index, None)

    def place(self) -> Place:
        """The first record that may speak of a group that is not settled."""
        with self._lock:
            places = [(record.start, record.n) for record in self._held.values()]
            return min(places, default=self.next or self.first)


def tables_of(samples: Sequence[Sample]) -> dict[str, pa.Table]:
    """The tables of these samples: `rollout`, and `judged` where filters have looked at them. None without samples."""
    if not samples:
        return {}
    judged = {"judged": judged_table(samples)} if samples[0].verdict is not None else {}
    return {"rollout": samples_to_table(samples)} | judged


def _spooled(index: int, version: int, samples: Sequence[Sample]) -> SpooledGroup:
    tokens = sum(len(sample.generated_versions) for sample in samples)
    return SpooledGroup(index=index, version=version, samples=len(samples), tokens=tokens)
