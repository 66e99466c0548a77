"""Leases groups to rollout workers as far ahead as the staleness rule allows, and gives iterations their groups.

The flow decides which groups begin, wait, are consumed or rejected. Its rollout workers run the workflows and hold
finished groups, which they write when an iteration takes them or after `rollout.flush_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.watchdog import Heartbeat
from areal_tasks.engines.workers import Backlog
from areal_tasks.rollout import orders
from areal_tasks.rollout.background import Background
from areal_tasks.rollout.filters import mean_reward
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.judging import VerifiersFailed
from areal_tasks.rollout.link import Link, WorkerLost
from areal_tasks.rollout.links import Assignments, Links
from areal_tasks.rollout.losses import Losses
from areal_tasks.rollout.rejections import Rejections, stale_reason
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.spooling import Place, Spool, Writer
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.rollout.suspects import Suspects
from areal_tasks.store.spool import SpoolDamaged
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 5.0  # between two checks, in a stage that waits for groups, whether workers have room
#: What the stage that takes groups raises after an attempt at a group failed, unless the workflow is the cause.
ERRORS: Final[Mapping[orders.Cause, Callable[[str], Exception]]] = {
    "servers": ServerDown, "verifiers": VerifiersFailed, "mistake": UserError,
}  # fmt: skip


@dataclass
class Rollouts:
    """The groups of one start of a run. Call all methods in the event loop of `client`, which manages the servers.

    `order` makes the first order for a worker; `connect` makes the link to the worker at an address. While `held` is
    set, no groups begin except those that `take` waits for.
    """

    tracker: GroupTracker
    client: InferenceClient
    order: Callable[[], orders.Begin]
    connect: Callable[[str, Rollouts], Link]
    limits: Rollout
    spool: Spool
    judged: dict[int, orders.Ended] = field(default_factory=dict)  # by group; stages remove them
    held: threading.Event = field(default_factory=threading.Event)
    _taking: bool = False
    _assigned: Assignments = field(default_factory=Assignments)
    _waiting: list[int] = field(default_factory=list)  # groups that the tracker has admitted, without a worker yet
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None  # ends or repeats the stage that takes groups
    _recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    _background: Background = field(default_factory=Background)

    def __post_init__(self) -> None:
        spool = self.spool
        self.writer = Writer(spool.store, spool.run, spool.owner, spool.made_with)  # of rejected groups
        self.links = Links(self.client, self._background, self.begin)
        self.rejections = Rejections(self.limits)
        self.suspects = Suspects()
        self.losses = Losses(self.tracker, spool, self.suspects, self.rejections)

    # ── what iterations take ────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, prefix: str) -> list[orders.Written]:
        """The next iteration's groups, in order, as parts of its tables below `prefix`, as soon as the rule allows it.

        Groups that filters rejected are recorded first: other groups began in their place, which a later start of the
        flow must know.

        Raises:
            ServerDown: no server is healthy. The running groups begin again with the next call.
            VerifiersFailed: the verifiers have failed.
            UserError: the workflow raised it, or too many groups were rejected (`Rejections`).
            StoreError: the store takes no groups.
        """
        if isinstance(self._failure, ServerDown):  # a server may be healthy again; other failures stay
            self._failure = None
        self._taking = True
        try:
            self.begin()
            for attempt in count():
                groups = await self._chosen()
                while self.rejections.by_filters():
                    await self._record(self.rejections.by_filters)
                    groups = await self._chosen()  # workers may have been lost, or have written groups to the spool
                parts = self._assigned.parts(groups, self.links.ready()[0], prefix, attempt, self.spool.records)
                written = await asyncio.gather(*(self._written(link, part) for link, part in parts))
                if all(written):
                    return [part for part in written if part is not None]
            raise AssertionError("count ends")
        finally:
            self._taking = False

    async def _chosen(self) -> list[int]:
        """The next iteration's groups, once the rule allows them and a worker can write them."""
        since = time.monotonic()
        closing = self.losses.closing.keys()
        while (taken := self.tracker.take()) is None or not self.links.ready() or not closing.isdisjoint(taken):
            if self._failure is not None:
                raise self._failure
            if taken is None and self._is_idle():
                raise RuntimeError(f"iteration {self.tracker.next} waits for groups, and none is being generated")
            since = self.links.check_room(self._assigned, self.limits.groups_in_memory, since)
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), CHECK_SECONDS)
        return taken

    def _is_idle(self) -> bool:
        """Whether no group is assigned, all workers are ready, and the servers have weights that are new enough."""
        if self._assigned or self.losses.closing or not 0 < len(self.links.by_start) == len(self.links.ready()):
            return False
        return self.client.version is None or self.client.version >= self.tracker.next - 1

    async def _written(self, link: Link, part: orders.Part) -> orders.Written | None:
        """Have a worker write a part; None if that failed and some of its groups begin again."""
        try:
            return await link.write(part)
        except WorkerLost:
            self.lost(link)
        except orders.LeaseOver:
            assigned = self._assigned.of(link, part.numbers)
            if len(assigned) == len(part.numbers):  # else some are in the spool by now, where the next attempt looks
                self._lose(assigned)
        except SpoolDamaged as error:
            if not part.groups:
                raise
            log.warning("groups %s begin again, since the spool is damaged: %s", list(part.groups), error)
            self._lose(part.groups)
        return None

    def consume(self, indices: Sequence[int]) -> None:
        """Record that the next iteration has committed these groups."""
        self.rejections.committed()
        self._forget([*indices, *self.tracker.consume(indices)])
        verified = {group for group, one in list(self.judged.items()) if isinstance(one, orders.Finished)}
        for group in verified.difference(indices, self.tracker.running.of, self.tracker.finished.of):
            self.judged.pop(group, None)  # it was lost after an iteration had taken it, or rejected as stale
        self.begin()

    def change_rule(self, rule: Staleness, why: str) -> None:
        """Apply another rule. Running groups for which it has no room begin again later.

        Finished ones are rejected as stale; `why` is the reason that is recorded. No iteration may be taking groups.
        """
        running, finished = self.tracker.change_rule(rule)
        self._forget([*running, *finished])
        for index in finished:
            self._reject(index, stale_reason(why))
        if running or finished:
            log.info("%d groups begin again and %d are rejected: %s", len(running), len(finished), why)
        self.begin()

    def change_settings(self, limits: Rollout, order: Callable[[], orders.Begin]) -> None:
        """Use these settings from now on."""
        self.limits = self.rejections.limits = limits
        self.tracker.pace, self.order = limits.pace, order
        self.begin()

    def _lose(self, groups: Collection[int]) -> None:
        """Have these groups begin again, without counting a failed attempt."""
        for group in groups:
            self.tracker.withdraw(group)
        self._forget(groups)
        self._news.set()
        self.begin()

    def _forget(self, groups: Collection[int]) -> None:
        self.spool.forget(groups)
        self.losses.forget(groups)
        for group in groups:
            self._assigned.end(group)

    async def settled(self) -> tuple[SettledGroups, list[Place]]:
        """Which groups are settled, and where in the spool others are.

        Groups that have failed are recorded only now, just before the commit that counts them: if a mistake in the
        workflow ends the run before, they begin again once it is corrected.
        """
        settled = self.tracker.settled
        await self._record(lambda: self.rejections.unrecorded)
        return settled, self.spool.places()

    async def _record(self, rejected: Callable[[], Mapping[int, RejectedGroup]]) -> None:
        """Record rejected groups; `rejected` is called once the previous recording is done."""
        async with self._recording:
            if groups := list(rejected().values()):
                for record in await asyncio.to_thread(self.writer.write, {}, groups):
                    self.spool.note(record, ())
                self.rejections.record(group.index for group in groups)

    async def flush(self) -> None:
        """Record finished groups, and groups that filters rejected, that are not in the store yet."""
        await asyncio.gather(*(link.flush() for link in self.links.ready()), self._record(self.rejections.by_filters))

    async def close(self) -> None:
        """Abandon running groups, and write finished ones to the store."""
        self.end(UserError("abandoned, since the flow ends: its groups begin again"))
        self.client.followers.parts = [part for part in self.client.followers.parts if part is not self.links]
        links, self.links.by_start = list(self.links.by_start.values()), {}
        self.losses.closing.clear()
        await asyncio.gather(*(link.close() for link in links), self._record(self.rejections.by_filters))

    # ── the workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def use_workers(self, starts: Collection[tuple[str, int]]) -> None:
        """Use exactly these starts of workers, (address, number of the start), from now on."""
        if self.links not in self.client.followers.parts:
            self.client.followers.parts.append(self.links)
        for start in self.links.by_start.keys() - set(starts):
            link = self.links.by_start.pop(start)
            await link.drop()
            self.lost(link)
        for start in [start for start in starts if start not in self.links.by_start]:
            self.links.by_start[start] = self.connect(start[0], self)

    async def heartbeats(self) -> dict[str, Heartbeat]:
        """The workers' heartbeats, by address."""
        return await self.links.heartbeats(self._assigned, self.limits)

    def backlog(self) -> Backlog:
        """How many groups are under way now, by worker. May be called from any thread."""
        generating, verifying = self._assigned.by_url("generating"), self._assigned.by_url("verifying")
        held = self._assigned.by_url("held")
        return Backlog(generating, verifying, held, self.tracker.ready() - held.total(), self.client.capacity)

    async def explained_ends(self) -> frozenset[tuple[str, int]]:
        """Starts of workers whose end is no failure: with groups in flight, now or when lost, or asked to end."""
        links = self.links.by_start.items()
        return frozenset(start for start, link in links if link.explained or self._assigned.running(link))

    async def leave(self, starts: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
        """Give these workers no further groups. Returns those that no longer hold any."""
        return self.links.leave(self._assigned, starts)

    def begun(self, link: Link) -> None:
        """Handle that a worker has begun: it can be given groups from now on."""
        link.explained, link.leaving = False, link.retired
        self._news.set()
        self._background.do(self.links.acknowledged())
        self.begin()

    def lost(self, link: Link) -> None:
        """Handle the loss of a worker: its groups begin again, unless it turns out to have recorded them."""
        link.ready, start, link.start = False, link.start, None
        if lost := self._assigned.of(link):
            link.explained = self._assigned.running(link) > 0
        for group in lost:
            self._assigned.end(group)
        if start is None:  # it records nothing
            self._begin_again(link.url, lost)
        else:
            self.losses.add(start, lost)
            self._background.store(0.0, lambda: True, lambda: self._close(start, link.url), self.end)

    async def _close(self, start: int, url: str) -> None:
        """Close the start of the lost worker at `url`."""
        self._begin_again(url, await self.losses.close(start))

    def _begin_again(self, url: str, lost: Sequence[int]) -> None:
        """Have groups of the lost worker at `url` begin again. Those that it generated are suspects."""
        if lost:
            log.warning("%d groups begin again: the rollout worker at %s was lost", len(lost), url)
        self.suspects.worker_ended(running := [group for group in lost if group in self.tracker.running.of])
        for group in running:
            if self._is_last(ends := self.suspects.ends[group]):
                self._reject(group, f"failed: its rollout worker ended {ends} times while it generated only this group")
        self._lose(lost)

    def received(self, link: Link, event: orders.Event) -> None:
        """Handle an event of a worker."""
        if isinstance(event, orders.Broken):
            self.end(UserError(event.reason))
        elif isinstance(event, orders.Down):
            self._background.do(self.client.evict({event.url: event.reason}))
        elif isinstance(event, orders.Leaving):
            log.warning("the rollout worker at %s uses too much memory, and ends after its groups", link.url)
            link.leaving = True
        elif isinstance(event, orders.Spooled):
            if link.ready:  # else it is lost, and what it has recorded is found when its start is closed
                self._spooled(link, event)
        elif not self._assigned.leased(event.index, link, event.number):
            link.take_back([event.number])
        else:
            self._handle(event)
        self._news.set()
        self.begin()

    def _handle(self, event: orders.Generated | orders.Finished | orders.Rejected | orders.Failed) -> None:
        """Handle an event of a group that is leased."""
        if isinstance(event, orders.Generated):
            self._assigned.enter(event.index, "verifying")
            return
        if isinstance(event, orders.Failed):
            self._fail(event)
            return
        self.suspects.clear(event.index)
        self.judged[event.index] = event
        if isinstance(event, orders.Finished):
            self._assigned.enter(event.index, "held")
            self.tracker.finish(event.index, event.version)
            self.rejections.keep()
        else:
            self._assigned.end(event.index)
            self._reject(event.index, event.reason, mean_reward(event.verdicts))
            self._background.store(
                self.limits.flush_seconds,
                lambda: event.index in self.rejections.by_filters(),
                lambda: self._record(self.rejections.by_filters),
                self.end,
            )

    def _spooled(self, link: Link, event: orders.Spooled) -> None:
        """Handle that groups were written to the store: those of `numbers` are finished, others are still verified."""
        link.take_back(list(event.numbers))
        stored = {group.index for group in event.record.finished}
        mine = stored.intersection(self._assigned.of(link))
        for group in mine.intersection(self._assigned.of(link, event.numbers)):
            self._assigned.remove(group)
        self.spool.note(event.record, mine)

    def _fail(self, event: orders.Failed) -> None:
        """Handle a failed attempt: the workflow's failure counts as an attempt; another cause ends the stage.

        A group that was lost with one server begins again with the newest weights: no iteration has to wait for it
        because of those that it had begun with.
        """
        self._assigned.end(event.index)
        if event.cause == "server":
            self._lose([event.index])
            return
        if event.cause != "workflow":
            self.tracker.withdraw(event.index)
            self.end(ERRORS[event.cause](event.reason))
            return
        self.suspects.clear(event.index)
        attempts = self.tracker.fail(event.index)
        level = logging.WARNING if self.tracker.failures.total() == 1 or self._is_last(attempts) else logging.DEBUG
        log.log(level, "group %d, attempt %d: %s", event.index, attempts, event.reason)
        if self._is_last(attempts):
            self._reject(event.index, f"failed: {event.reason}")

    def _reject(self, index: int, reason: str, reward: float | None = None) -> None:
        """Reject a group: it will not be trained on."""
        self.tracker.reject(index)
        self.suspects.clear(index)
        failure = self.rejections.add(RejectedGroup(index=index, reason=reason, reward=reward))
        self._failure = self._failure or failure

    def _is_last(self, attempts: int) -> bool:
        return attempts >= self.limits.group_attempts

    def end(self, error: BaseException) -> None:
        """End or repeat the stage that takes groups."""
        self._failure = error
        self._news.set()

    def begin(self) -> None:
        """Lease what the rule admits to workers with room; none while workers start, or `held` and no stage waits."""
        for link in self.links.left(self._assigned):
            self._background.do(link.end())
        links, held = self.links.with_room(self._assigned, self.limits.groups_in_memory), self.held.is_set()
        if (version := self.client.version) is None or self._failure is not None or self.links.starting or not links:
            return
        if held and not self._taking:
            return
        running = self.tracker.running.of
        most = self.client.capacity - (len(running) - self._assigned.by_url("verifying").total())
        self._waiting = [group for group in self._waiting if group in running]
        self._waiting += self.tracker.lease(version, min(most, self.tracker.short()) if held else most)
        if self._waiting:
            self._give(links)

    def _give(self, links: Sequence[Link]) -> None:
        """Assign groups that wait for a worker; suspects only to workers without other groups."""
        by_group = self._assigned.by_group
        running = {link: self._assigned.running(link) for link in links}
        suspecting = {by_group[group].link for group in self.suspects.at_once if group in by_group}
        shares, free = self.suspects.place(self._waiting, running, suspecting)
        size = -(-min(self.client.capacity, self.tracker.rule.batch(self.tracker.next)) // len(links))
        others = (group for group in self._waiting if group not in self.suspects)
        for link, groups in [*shares.items(), *self._assigned.in_blocks(others, free, max(size, 1)).items()]:
            floors = {group: self.tracker.running.of[group] for group in groups}
            self._assigned.give(link, floors, suspect=link in shares)
        self._waiting = [group for group in self._waiting if group not in by_group]
