"""Generates a run's groups as far ahead as the staleness rule allows, and gives each iteration the groups it takes.

Groups are generated in the event loop of the servers' client, whatever the flow does meanwhile: with η > 0 they are
under way while the trainer trains. With η = 0 an iteration's groups begin when it asks for them (DESIGN §9).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from areal_tasks.engines.server import Refused, ServerDown
from areal_tasks.rollout.book import Book, Lease
from areal_tasks.rollout.filters import mean_reward
from areal_tasks.rollout.judging import Judge, Unjudged, verdicts_of
from areal_tasks.rollout.rejections import Rejections
from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.spooling import Place, Spool
from areal_tasks.store.backend import StoreError
from areal_tasks.store.spool import StartClosed
from areal_tasks.workflows import Prompt, Sample, Workflow, WorkflowContext
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # until groups are written that a store has not taken


@dataclass
class Rollouts:
    """The groups of one start of a run. All methods belong to the event loop of the client in `context`.

    `prompt_of` gives the prompt of a group, by its number. While `held`, no group begins but those that `take` waits
    for.
    """

    book: Book
    workflow: Workflow
    context: WorkflowContext
    prompt_of: Callable[[int], Prompt]
    limits: Rollout
    spool: Spool
    judge: Judge | None = None  # where filters may reject groups
    held: threading.Event = field(default_factory=threading.Event)
    finished: dict[int, list[Sample]] = field(default_factory=dict)  # by this start, and not settled
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _judging: set[int] = field(default_factory=set)  # those of them that no server is at any more
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _taking: bool = False
    _failure: BaseException | None = None  # what must end or repeat the stage that takes groups
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _flushes: set[asyncio.Task[None]] = field(default_factory=set)  # the event loop itself keeps none alive

    def __post_init__(self) -> None:
        self.rejections = Rejections(self.limits)

    async def take(self) -> list[int]:
        """The numbers of the next iteration's groups, in order, as soon as the rule gives them out.

        The samples of those that are not in `finished` are in the spool. What filters have rejected is recorded by
        then: it has made room for these groups, and makes it again should the flow be killed.

        Raises:
            ServerDown: no server is left. The groups under way begin again with the next call.
            Unjudged: the verifiers have failed.
            UserError: the workflow raised it, or too many groups were rejected (`Rejections`).
        """
        if isinstance(self._failure, ServerDown):  # there may be one again; nothing else mends itself
            self._failure = None
        self._taking = True
        try:
            self.begin()
            while (taken := self.book.take()) is None:
                if self._failure is not None:
                    raise self._failure
                if not self._running:
                    raise RuntimeError(f"iteration {self.book.next} waits for groups, and none is under way")
                self._news.clear()
                await self._news.wait()
            await self._record_filtered()
            return [group.index for group in taken]
        finally:
            self._taking = False

    def consume(self, indices: Sequence[int]) -> None:
        """The next iteration has committed these groups."""
        self.rejections.told()
        self._forget([*indices, *self.book.consume(indices)])
        self.begin()

    def drop(self, indices: Sequence[int]) -> None:
        """The rows of these groups cannot be read: they begin again."""
        for index in indices:
            self.book.withdraw(index)
        self._forget(indices)

    def _forget(self, indices: Sequence[int]) -> None:
        self.spool.forget(indices)
        for index in indices:
            self.finished.pop(index, None)
            if (task := self._running.pop(index, None)) is not None:
                task.cancel()

    async def settled(self) -> tuple[Settled, Place]:
        """Which groups are settled, and the first record of the spool that may speak of others.

        Groups that have failed are recorded with the commit that counts them, just before it: if a mistake of the
        workflow ends the run, they begin again once it is corrected.
        """
        async with self._flushing:
            settled = self.book.settled
            await self._write({}, self.rejections.unrecorded)
        return settled, self.spool.place()

    async def close(self) -> None:
        """Give up the groups under way, and leave those that wait in the store."""
        self._failure = RuntimeError("the groups were given up")  # no other begins
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Record what has finished, or was rejected by a filter, and is not in the store yet."""
        async with self._flushing:
            waiting = {index: samples for index, samples in self.finished.items() if index not in self.spool}
            finished = {index: (self.book.live[index].version, samples) for index, samples in waiting.items()}
            await self._write(finished, self.rejections.by_filters())

    async def _record_filtered(self) -> None:
        async with self._flushing:
            await self._write({}, self.rejections.by_filters())

    async def _write(
        self, finished: Mapping[int, tuple[int, list[Sample]]], rejected: Mapping[int, RejectedGroup]
    ) -> None:
        """Record these groups. The caller holds `_flushing`."""
        groups = list(rejected.values())
        if finished or groups:
            await asyncio.to_thread(self.spool.write, finished, groups)
            self.spool.forget([index for index in finished if index not in self.finished])  # consumed meanwhile
            self.rejections.record(group.index for group in groups)

    def begin(self) -> None:
        """Begin as many groups as the rule admits now."""
        client = self.context.client
        if client.version is None or self._failure is not None:
            return
        most = client.capacity - (len(self._running) - len(self._judging))
        if self.held.is_set():
            most = min(most, self.book.short()) if self._taking else 0
        for lease in self.book.lease(client.version, most):
            self._running[lease.index] = asyncio.ensure_future(self._generate(lease))

    async def _generate(self, lease: Lease) -> None:
        """Bring one group to its end, whatever that is."""
        samples: list[Sample] = []
        reason, failure = "", None
        try:
            samples = await self._attempt(lease)
            reason = await self._judged(lease, samples)
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # a workflow may even call sys.exit
            failure = error
        if self._running.get(lease.index) is not asyncio.current_task():
            return  # it was consumed, or dropped, meanwhile
        del self._running[lease.index]
        if reason:
            self._reject(lease.index, reason, mean_reward(verdicts_of(samples)))
            self._flush_after(self.limits.flush_seconds, lease.index)
        elif failure is None:
            self.finished[lease.index] = samples
            self.book.finish(lease.index, oldest_version(samples, lease.floor))
            self.rejections.keep()
            self._flush_after(self.limits.flush_seconds, lease.index)
        elif isinstance(failure, asyncio.CancelledError) and is_cancelled():
            self.book.withdraw(lease.index)
        else:
            self._fail(lease, failure)
        self._news.set()
        self.begin()

    async def _attempt(self, lease: Lease) -> list[Sample]:
        try:
            async with asyncio.timeout(self.limits.group_seconds) as limit:
                return checked(await self.workflow.run(self.prompt_of(lease.index), self.context), lease.index)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"not done after {self.limits.group_seconds:g} s (rollout.group_seconds)") from error

    async def _judged(self, lease: Lease, samples: list[Sample]) -> str:
        """Why a filter rejects the group; empty if none does. Servers are at other groups meanwhile."""
        if self.judge is None:
            return ""
        self._judging.add(lease.index)
        self.begin()
        try:
            return await self.judge(samples)
        finally:
            self._judging.discard(lease.index)

    def _flush_after(self, seconds: float, index: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._flush_now, index)

    def _flush_now(self, index: int) -> None:
        """Flush, unless the group has been consumed or recorded since; once more later where the store fails."""
        waiting = index in self.finished and index not in self.spool
        if not waiting and index not in self.rejections.by_filters():
            return

        async def flush() -> None:
            try:
                await self.flush()
            except StartClosed as error:
                self._failure = error
                self._news.set()
            except StoreError as error:
                log.warning("finished groups are not in the store yet: %s", error)
                self._flush_after(RETRY_SECONDS, index)
            except Exception as error:  # such as samples that make no table: the stage that takes them says so too
                log.exception("finished groups cannot be written to the store")
                self._failure = error
                self._news.set()

        task = asyncio.ensure_future(flush())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    def _fail(self, lease: Lease, error: BaseException) -> None:
        """Failed servers or verifiers, and a user's mistake, end the stage; all else costs the group an attempt."""
        if isinstance(error, (ServerDown, Unjudged, UserError)) and not isinstance(error, Refused):
            self.book.withdraw(lease.index)
            self._failure = error
            return
        reason = f"{type(error).__name__}: {error}"
        attempts = self.book.fail(lease.index)
        first = self.book.failures.total() == 1  # its traceback says the most
        level = logging.WARNING if first or attempts >= self.limits.group_attempts else logging.DEBUG
        log.log(level, "group %d, attempt %d: %s", lease.index, attempts, reason, exc_info=error if first else None)
        if attempts < self.limits.group_attempts:
            return
        self._reject(lease.index, f"failed: {reason}")

    def _reject(self, index: int, reason: str, reward: float | None = None) -> None:
        """A group will not be trained on."""
        self.book.reject(index)
        failure = self.rejections.add(RejectedGroup(index=index, reason=reason, reward=reward))
        self._failure = self._failure or failure


def is_cancelled() -> bool:
    """Whether the current task was cancelled, rather than something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
