"""The groups that a worker was given: those under way, and those that have finished and wait to be written.

All methods belong to the event loop of the client of the servers. Leases have numbers: what was begun again is another
lease, so that nothing that is said of the first is taken for the second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient, Piece
from areal_tasks.engines.server import Refused, ServerDown
from areal_tasks.rollout.judging import Judge, Unjudged, verdicts_of
from areal_tasks.rollout.orders import (
    Broken,
    Cause,
    Event,
    Failed,
    Finished,
    Generated,
    Gone,
    Leased,
    Orders,
    Part,
    Rejected,
    Spooled,
    Written,
)  # fmt: skip
from areal_tasks.rollout.spooling import Writer, spooled_rows, tables_of
from areal_tasks.store.backend import StoreError
from areal_tasks.store.shards import write_table
from areal_tasks.store.spool import StartClosed
from areal_tasks.workflows import Prompt, Sample, Workflow, WorkflowContext
from schemas.errors import UserError
from schemas.manifest import SpoolRecord
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

#: Whose failure an error of a group is; all others are the workflow's.
CAUSES: Final[tuple[tuple[type[BaseException], Cause], ...]] = (
    (Refused, "workflow"), (ServerDown, "servers"), (Unjudged, "verifiers"), (UserError, "mistake"),
)  # fmt: skip
#: Of the rows of any table.
ORDER: Final = [("group_id", "ascending"), ("sample_index", "ascending")]
RETRY_SECONDS: Final = 5.0  # until groups are written that a store has not taken


class AtLeast:
    """The client, for a leased group: none of its requests goes to a server with weights older than `floor`."""

    def __init__(self, client: InferenceClient, floor: int) -> None:
        self._client = client
        self._floor = floor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `InferenceClient.generate`."""
        return await self._client.generate([replace(request, floor=self._floor) for request in requests])

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """As `InferenceClient.stream`."""
        return self._client.stream(replace(request, floor=self._floor))


@dataclass(frozen=True)
class Held:
    """A finished group. `version` is that of its oldest token."""

    index: int
    version: int
    samples: list[Sample]


@dataclass
class Groups:
    """`prompt_of` gives the prompt of a group, by its number; `tell` takes what the flow is to know."""

    workflow: Workflow
    context: WorkflowContext
    prompt_of: Callable[[int], Prompt]
    limits: Rollout
    writer: Writer
    tell: Callable[[Event], None]
    judge: Judge | None = None  # where filters may reject groups
    finished: dict[int, Held] = field(default_factory=dict)  # in memory only, by the number of the lease
    _spooled: dict[int, tuple[int, SpoolRecord]] = field(default_factory=dict)  # group and record, until the flow knows
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _flushes: set[asyncio.Task[None]] = field(default_factory=set)  # the event loop itself keeps none alive

    def obey(self, orders: Orders) -> None:
        """Begin groups, and let go of leases that are over."""
        for number in orders.forget:
            self.finished.pop(number, None)
            self._spooled.pop(number, None)
            if (task := self._running.pop(number, None)) is not None:
                task.cancel()
        for lease in orders.begin:
            self._running[lease.number] = asyncio.ensure_future(self._generate(lease))

    async def close(self) -> None:
        """Give up the groups under way, and leave those that wait in the store."""
        running = list(self._running.values())
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Record what has finished and is not in the store yet; it needs no memory any more."""
        async with self._flushing:
            waiting = dict(self.finished)
            if not waiting:
                return
            groups = {held.index: (held.version, held.samples) for held in waiting.values()}
            for record in await asyncio.to_thread(self.writer.write, groups):
                there = {group.index for group in record.finished}
                numbers = tuple(n for n, held in waiting.items() if held.index in there and n in self.finished)
                for number in numbers:
                    self._spooled[number] = (self.finished.pop(number).index, record)
                self.tell(Spooled(numbers=numbers, record=record))

    async def write(self, part: Part) -> Written:
        """Write groups that an iteration takes, in order.

        Raises:
            Gone: a lease is not here, or not any more.
            StoreError: rows in the spool cannot be read, or the store does not take the part.
        """
        records = {(record.start, record.n): record for record in part.records}
        groups, samples = set(part.groups), list[Sample]()
        for number in part.numbers:
            if (held := self.finished.get(number)) is not None:
                samples += held.samples
            elif number in self._spooled:
                group, record = self._spooled[number]
                records[record.start, record.n] = record
                groups.add(group)
            else:
                raise Gone(f"lease {number} is over")
        return await asyncio.to_thread(self._write, part, samples, list(records.values()), groups)

    def _write(
        self, part: Part, samples: Sequence[Sample], records: Sequence[SpoolRecord], groups: set[int]
    ) -> Written:
        store, tables = self.writer.store, tables_of(samples)
        if records:
            for name in ["rollout", *(["judged"] if self.judge is not None else [])]:
                spooled = spooled_rows(store, records, groups, name)
                tables[name] = pa.concat_tables([tables.get(name, spooled.slice(0, 0)), spooled]).sort_by(ORDER)
        rows = tables["rollout"]
        return Written(
            tables={
                name: write_table(store, part.prefix, name, table, file=f"{name}{part.label}")
                for name, table in tables.items()
            },
            samples=len(rows),
            tokens=pc.sum(rows["num_generated"]).as_py(),
            truncated=pc.sum(rows["truncated"]).as_py(),
        )

    async def _generate(self, lease: Leased) -> None:
        """Bring one group to its end, whatever that is."""
        samples: list[Sample] = []
        reason, failure = "", None
        try:
            samples = await self._attempt(lease)
            if self.judge is not None:
                self.tell(Generated(number=lease.number, index=lease.index))
                reason = await self.judge(samples)
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # a workflow may even call sys.exit
            failure = error
        if self._running.get(lease.number) is not asyncio.current_task():
            return  # it is over
        del self._running[lease.number]
        if failure is not None:
            self._fail(lease, failure)
            return
        verdicts = tuple(verdicts_of(samples))
        if reason:
            self.tell(Rejected(number=lease.number, index=lease.index, reason=reason, verdicts=verdicts))
            return
        held = Held(lease.index, oldest_version(samples, lease.floor), samples)
        self.finished[lease.number] = held
        self.tell(Finished(number=lease.number, index=held.index, version=held.version, verdicts=verdicts))
        full = len(self.finished) > self.limits.groups_in_memory
        self._flush_after(0.0 if full else self.limits.flush_seconds, lease.number)

    async def _attempt(self, lease: Leased) -> list[Sample]:
        try:
            async with asyncio.timeout(self.limits.group_seconds) as limit:
                client = cast(InferenceClient, AtLeast(self.context.client, lease.floor))
                context = replace(self.context, client=client)
                return checked(await self.workflow.run(self.prompt_of(lease.index), context), lease.index)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"not done after {self.limits.group_seconds:g} s (rollout.group_seconds)") from error

    def _fail(self, lease: Leased, error: BaseException) -> None:
        log.warning("group %d has failed", lease.index, exc_info=error)
        cause = next((cause for kind, cause in CAUSES if isinstance(error, kind)), "workflow")
        reason = f"{type(error).__name__}: {error}" if cause == "workflow" else str(error)
        self.tell(Failed(number=lease.number, index=lease.index, reason=reason, cause=cause))

    def _flush_after(self, seconds: float, number: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._flush_now, number)

    def _flush_now(self, number: int) -> None:
        """Flush, unless the group is in the store or not needed any more; once more later where the store fails."""
        if number not in self.finished:
            return

        async def flush() -> None:
            try:
                await self.flush()
            except StartClosed as error:
                self.tell(Broken(reason=str(error)))
            except StoreError as error:
                log.warning("finished groups are not in the store yet: %s", error)
                self._flush_after(RETRY_SECONDS, number)
            except Exception as error:  # such as samples that make no table
                log.exception("finished groups cannot be written to the store")
                self.tell(Broken(reason=f"finished groups cannot be written to the store: {error}"))

        task = asyncio.ensure_future(flush())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)


def checked(samples: object, group: int) -> list[Sample]:
    """What a workflow has returned for a group. TypeError if it is no list of the group's samples."""
    wanted = isinstance(samples, list) and samples and all(isinstance(sample, Sample) for sample in samples)
    if not wanted:
        raise TypeError(f"the workflow's `run` returned {str(samples)[:100]} for a group, not its samples in a list")
    if any(sample.prompt.group_id != group for sample in samples):  # type: ignore[attr-defined]
        raise TypeError("the workflow's `run` returned samples of another prompt than it was given")
    return samples  # type: ignore[return-value]


def oldest_version(samples: Sequence[Sample], floor: int) -> int:
    """The weights version of a group's oldest token; `floor` if it has no token."""
    versions = [int(sample.generated_versions.min()) for sample in samples if len(sample.generated_versions)]
    return min(versions, default=floor)
