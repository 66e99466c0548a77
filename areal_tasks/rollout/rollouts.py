"""Generates a run's groups as far ahead as the staleness rule allows, and gives each iteration the groups it takes.

Groups are generated in the event loop of the servers' client, whatever the flow does meanwhile: with η > 0 they are
under way while the trainer trains. With η = 0 an iteration's groups begin when it asks for them (DESIGN §9).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from areal_tasks.engines.server import Refused, ServerDown
from areal_tasks.rollout.book import Book, Lease
from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.spooling import Place, Spool
from areal_tasks.store.backend import StoreError
from areal_tasks.store.spool import StartClosed
from areal_tasks.workflows import Prompt, Sample, Workflow, WorkflowContext
from schemas.errors import UserError
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # until groups are written that a store has not taken


@dataclass
class Rollouts:
    """The groups of one start of a run. All methods belong to the event loop of the client in `context`.

    `prompt_of` gives the prompt of a group, by its number.
    """

    book: Book
    workflow: Workflow
    context: WorkflowContext
    prompt_of: Callable[[int], Prompt]
    limits: Rollout
    spool: Spool
    finished: dict[int, list[Sample]] = field(default_factory=dict)  # by this start, and not settled
    rejected: dict[int, str] = field(default_factory=dict)  # groups that will not be trained on, and why
    _recorded: int = 0  # of the rejected groups, in the spool
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None  # what must end or repeat the stage that takes groups
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _flushes: set[asyncio.Task[None]] = field(default_factory=set)  # the event loop itself keeps none alive

    async def take(self) -> list[int]:
        """The numbers of the next iteration's groups, in order, as soon as the rule gives them out.

        The samples of those that are not in `finished` are in the spool.

        Raises:
            ServerDown: no server is left. The groups under way begin again with the next call.
            UserError: the workflow raised it, or more than `rollout.max_failed_groups` groups have failed.
        """
        if isinstance(self._failure, ServerDown):  # there may be one again; nothing else mends itself
            self._failure = None
        self._begin()
        while (taken := self.book.take()) is None:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise RuntimeError(f"iteration {self.book.next} waits for groups, and none is under way")
            self._news.clear()
            await self._news.wait()
        return [group.index for group in taken]

    def consume(self, indices: Sequence[int]) -> None:
        """The next iteration has committed these groups."""
        self._forget([*indices, *self.book.consume(indices)])
        self._begin()

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

        Rejections are recorded with the commit that counts them, just before it: groups that failed because of a
        mistake that ended the run begin again once it is corrected.
        """
        async with self._flushing:
            settled, rejected = self.book.settled, dict(islice(self.rejected.items(), self._recorded, None))
            if rejected:
                await asyncio.to_thread(self.spool.write, {}, rejected)
                self._recorded += len(rejected)
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
        """Record what has finished and is not in the store yet."""
        async with self._flushing:
            waiting = {index: samples for index, samples in self.finished.items() if index not in self.spool}
            finished = {index: (self.book.live[index].version, samples) for index, samples in waiting.items()}
            if finished:
                await asyncio.to_thread(self.spool.write, finished, {})
                self.spool.forget([index for index in finished if index not in self.finished])  # consumed meanwhile

    def _begin(self) -> None:
        """Begin as many groups as the rule admits now."""
        client = self.context.client
        if client.version is None or self._failure is not None:
            return
        for lease in self.book.lease(client.version, client.capacity - len(self._running)):
            self._running[lease.index] = asyncio.ensure_future(self._generate(lease))

    async def _generate(self, lease: Lease) -> None:
        """Bring one group to its end, whatever that is."""
        samples: list[Sample] = []
        failure: BaseException | None = None
        try:
            samples = await self._attempt(lease)
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # a workflow may even call sys.exit
            failure = error
        if self._running.get(lease.index) is not asyncio.current_task():
            return  # it was consumed, or dropped, meanwhile
        del self._running[lease.index]
        if failure is None:
            self.finished[lease.index] = samples
            self.book.finish(lease.index, oldest_version(samples, lease.floor))
            self._flush_after(self.limits.flush_seconds, lease.index)
        elif isinstance(failure, asyncio.CancelledError) and is_cancelled():
            self.book.withdraw(lease.index)
        else:
            self._fail(lease, failure)
        self._news.set()
        self._begin()

    async def _attempt(self, lease: Lease) -> list[Sample]:
        try:
            async with asyncio.timeout(self.limits.group_seconds) as limit:
                return checked(await self.workflow.run(self.prompt_of(lease.index), self.context), lease.index)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"not done after {self.limits.group_seconds:g} s (rollout.group_seconds)") from error

    def _flush_after(self, seconds: float, index: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._flush_now, index)

    def _flush_now(self, index: int) -> None:
        """Flush, unless the group has been consumed or recorded since; once more later where the store fails."""
        if index in self.spool or index not in self.finished:
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
        """A server's failure and a user's mistake end the stage; anything else costs the group one of its attempts."""
        if isinstance(error, ServerDown) or (isinstance(error, UserError) and not isinstance(error, Refused)):
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
        self.book.reject(lease.index)
        self.rejected[lease.index] = f"failed: {reason}"
        if len(self.rejected) > self.limits.max_failed_groups and self._failure is None:
            self._failure = UserError(
                f"{len(self.rejected)} of the groups have failed in {attempts} attempts each, more than "
                f"rollout.max_failed_groups = {self.limits.max_failed_groups}. The last one, group {lease.index}: "
                f"{reason}. Correct the workflow and run this again: the groups begin again"
            )


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
