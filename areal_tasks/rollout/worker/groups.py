"""The groups of a rollout worker: running ones, and finished ones that wait to be written.

Call all methods in the event loop of the inference client. A group that begins again has a lease with another number,
so that a message about the first attempt is not taken for one about the second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.engines.client import InferenceClient, Lost
from areal_tasks.engines.server import BadRequest, ServerDown
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout import orders
from areal_tasks.rollout.background import Background
from areal_tasks.rollout.judging import Judge, VerifiersFailed, basis, row_of, verdicts_of
from areal_tasks.rollout.spooling import Writer, narrowed, spooled_rows, tables_of
from areal_tasks.rollout.worker.apart import LeasedClient, in_time
from areal_tasks.store.backend import StoreError
from areal_tasks.store.shards import write_table
from areal_tasks.store.spool import StartClosed
from areal_tasks.workflows import Prompt, Sample, SingleTurn, Workflow, WorkflowContext, check_values
from schemas.errors import UserError
from schemas.manifest import SpoolRecord
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

#: The cause of each kind of error of a group; any other error is the workflow's.
CAUSES: Final[tuple[tuple[type[BaseException], orders.Cause], ...]] = (
    (BadRequest, "workflow"), (ServerDown, "servers"), (VerifiersFailed, "verifiers"), (UserError, "mistake"),
    (Lost, "server"),
)  # fmt: skip
#: The order of the rows of every table.
ORDER: Final = [("group_id", "ascending"), ("sample_index", "ascending")]


@dataclass(frozen=True)
class Held:
    """A finished group. `version` is that of its oldest token."""

    index: int
    version: int
    samples: list[Sample]


@dataclass
class Groups:
    """The groups of one worker. `prompt_of` gives the prompt of a group; `report` sends the flow an event."""

    workflow: Workflow
    context: WorkflowContext
    prompt_of: Callable[[int], Prompt]
    limits: Rollout
    writer: Writer
    report: Callable[[orders.Event], None]
    judge: Judge | None = None  # if groups are verified as they finish
    spools: bool = True  # else finished groups stay in memory
    finished: dict[int, Held] = field(default_factory=dict)  # in memory only, by lease number
    judging: dict[int, Held] = field(default_factory=dict)  # the same, while their verdicts are made in advance
    leaving: bool = False  # finished groups are written at once
    unwritten: str = ""  # why the last attempt to write finished groups failed; empty: it did not
    _spooled: dict[int, tuple[int, SpoolRecord]] = field(default_factory=dict)  # group and record, by lease number
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _background: Background = field(default_factory=Background)

    def apply(self, given: orders.Orders) -> None:
        """Begin the groups of new leases, and drop those whose leases are over."""
        for lease in given.begin:
            self._running[lease.number] = asyncio.ensure_future(self._generate(lease))
        for number in given.forget:  # may be one of those
            self.finished.pop(number, None)
            self.judging.pop(number, None)
            self._spooled.pop(number, None)
            if (task := self._running.pop(number, None)) is not None:
                task.cancel()

    def leave(self) -> None:
        """Write finished groups at once from now on."""
        self.leaving = True
        for number in self.finished:
            self._flush_after(0.0, number)

    async def close(self) -> None:
        """Abandon running groups, and write finished ones to the store, unless the flow has given this worker up."""
        running = list(self._running.values())
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with suppress(StartClosed):
            await self.flush()
        self.finished.clear()  # what waits to be written later is not
        self.judging.clear()

    async def flush(self) -> None:
        """Write finished groups to the spool, and drop them from memory; those that are judged, once they are."""
        async with self._flushing:
            waiting = self.finished | {n: held for n, held in self.judging.items() if n not in self._spooled}
            if not waiting or not self.spools:
                return
            groups = {held.index: (held.version, held.samples) for held in waiting.values()}
            try:
                records = await asyncio.to_thread(self.writer.write, groups)
            except StoreError as error:
                self.unwritten = str(error)
                raise
            self.unwritten = ""
            *earlier, last = records  # those may have other attempts at these groups
            for record in earlier:
                self.report(orders.Spooled(numbers=(), record=record))
            known = self.finished.keys() | self.judging.keys()
            self._spooled |= {n: (held.index, last) for n, held in waiting.items() if n in known}
            numbers = tuple(n for n in waiting if self.finished.pop(n, None) is not None)
            self.report(orders.Spooled(numbers=numbers, record=last))

    async def write(self, part: orders.Part) -> orders.Written:
        """Write groups that an iteration takes, in order.

        Raises:
            LeaseOver: one of the leases is over, or unknown.
            SpoolDamaged: rows in the spool cannot be read.
            StoreError: the store does not take the part.
        """
        records, samples = {(record.start, record.n): record for record in part.records}, list[Sample]()
        for number in part.numbers:
            if (held := self.finished.get(number)) is not None:
                samples += held.samples
            elif number in self._spooled:
                group, record = self._spooled[number]
                place = (record.start, record.n)
                others = records[place].finished if place in records else ()
                records[place] = narrowed(record, {group, *(other.index for other in others)})
            else:
                raise orders.LeaseOver(f"lease {number} is over")
        return await asyncio.to_thread(self._write, part, samples, list(records.values()))

    def _write(self, part: orders.Part, samples: Sequence[Sample], records: Sequence[SpoolRecord]) -> orders.Written:
        store, tables = self.writer.store, tables_of(samples)
        if records:
            for name in ["rollout", *(["judged"] if self.judge is not None and self.judge.decides else [])]:
                spooled = spooled_rows(store, records, name)
                tables[name] = pa.concat_tables([tables.get(name, spooled.slice(0, 0)), spooled]).sort_by(ORDER)
        rows = tables["rollout"]
        return orders.Written(
            tables={
                name: write_table(store, part.prefix, name, table, file=f"{name}{part.label}")
                for name, table in tables.items()
            },
            samples=len(rows),
            tokens=pc.sum(rows["num_generated"]).as_py(),
            truncated=pc.sum(rows["truncated"]).as_py(),
        )

    async def _generate(self, lease: orders.Lease) -> None:
        """Run one attempt at a group, and report how it ends."""
        samples: list[Sample] = []
        reason, failure = "", None
        try:
            if lease.suspect:
                with suppress(StoreError, StartClosed):  # it is written later
                    await asyncio.shield(self.flush())
            samples, reason = await self._attempt(lease)
        except GeneratorExit:  # the event loop has ended
            raise
        except BaseException as error:  # a workflow may even call sys.exit
            failure = error
        if self._running.get(lease.number) is not asyncio.current_task():
            return  # the lease is over
        del self._running[lease.number]
        if failure is not None:
            self._fail(lease, failure)
            return
        ended = orders.Ended(
            number=lease.number,
            index=lease.index,
            verdicts=tuple(verdicts_of(samples)),
            basis=basis(self.judge.judged_with, map(row_of, samples)) if self.judge is not None else "",
        )
        if reason:
            self.report(orders.Rejected(**dict(ended), reason=reason))
        else:
            self._finish(ended, self.judging.pop(lease.number, held_of(samples, lease)))

    def _finish(self, ended: orders.Ended, held: Held) -> None:
        """Report a finished group, and keep it in memory unless it was written while it was verified."""
        self.report(orders.Finished(**dict(ended), version=held.version))
        if ended.number in self._spooled:
            self.report(orders.Spooled(numbers=(ended.number,), record=self._spooled[ended.number][1]))
            return
        self.finished[ended.number] = held
        full = self.leaving or len(self.finished) >= self.limits.groups_in_memory
        self._flush_after(0.0 if full else self.limits.flush_seconds, ended.number)

    async def _attempt(self, lease: orders.Lease) -> tuple[list[Sample], str]:
        """The group's samples, and why a filter rejects them, if one does."""
        whole = isinstance(self.workflow, SingleTurn)  # all that a group has is lost with one request
        client = LeasedClient(self.context.client, lease.floor, begins_again=whole)
        context = replace(self.context, client=cast(InferenceClient, client))
        if (judge := self.judge) is None:
            return await self._samples(lease, context), ""
        known = dict[Row, VerifyResult]()

        async def verify(sample: Sample) -> VerifyResult:
            return await client.here(judge.verdict(known, sample))

        samples = await self._samples(lease, replace(context, verify=verify) if judge.decides else context)
        self.report(orders.Generated(number=lease.number, index=lease.index))
        if not judge.decides:
            self.judging[lease.number] = held_of(samples, lease)
            self._flush_after(self.limits.flush_seconds, lease.number)
        try:
            return samples, await judge(samples, known)
        except (VerifiersFailed, UserError) as error:
            if judge.decides:
                raise
            log.warning("groups are no longer verified as they finish: %s", error)
            self.judge = None
            return samples, ""

    async def _samples(self, lease: orders.Lease, context: WorkflowContext) -> list[Sample]:
        work = self.workflow.run(self.prompt_of(lease.index), context)
        section = "rollout" if self.spools else "evaluation"
        samples = await in_time(work, self.limits.group_seconds, f"{section}.group_seconds")
        return checked(samples, lease)

    def _fail(self, lease: orders.Lease, error: BaseException) -> None:
        if not isinstance(error, Lost):
            log.warning("group %d has failed", lease.index, exc_info=error)
        cause = next((cause for kind, cause in CAUSES if isinstance(error, kind)), "workflow")
        reason = f"{type(error).__name__}: {error}" if cause == "workflow" else str(error)
        self.report(orders.Failed(number=lease.number, index=lease.index, reason=reason, cause=cause))

    def _flush_after(self, seconds: float, number: int) -> None:
        """Flush after `seconds` if the group of lease `number` is still in memory."""

        def failed(error: Exception) -> None:
            self.report(orders.Broken(reason=f"finished groups cannot be written to the store: {error}"))

        def in_memory() -> bool:
            return number in self.finished or number in self.judging

        self._background.store(seconds, in_memory, self.flush, failed)


def checked(samples: object, lease: orders.Lease) -> list[Sample]:
    """The samples that a workflow returned. TypeError unless they are valid samples of the leased group."""
    wanted = isinstance(samples, list) and samples and all(isinstance(sample, Sample) for sample in samples)
    if not wanted:
        raise TypeError(f"the workflow's `run` returned {str(samples)[:100]} for a group, not its samples in a list")
    found = cast(list[Sample], samples)
    if any(sample.prompt.group_id != lease.index for sample in found):
        raise TypeError("the workflow's `run` returned samples of another prompt than it was given")
    if any(later.sample_index <= sample.sample_index for sample, later in pairwise(found)):
        raise TypeError("the workflow's `run` returned samples that are not in the order of `sample_index`")
    check_values(found)
    if (oldest := oldest_version(found, lease.floor)) < lease.floor:
        raise TypeError(
            f"a sample that the workflow returned has a token of weights version {oldest}; its group was given no "
            f"version before {lease.floor}: take `versions` from the client's answers"
        )
    return found


def held_of(samples: list[Sample], lease: orders.Lease) -> Held:
    """The group of a lease, as it waits in memory."""
    return Held(lease.index, oldest_version(samples, lease.floor), samples)


def oldest_version(samples: Sequence[Sample], floor: int) -> int:
    """The weights version of a group's oldest token; `floor` if it has no token."""
    versions = [int(sample.generated_versions.min()) for sample in samples if len(sample.generated_versions)]
    return min(versions, default=floor)
