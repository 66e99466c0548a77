"""Has workers generate a run's groups as far ahead as the staleness rule allows, and gives iterations what they take.

The flow keeps the book: which groups begin, wait, are consumed or rejected. Its rollout workers run the workflows and
hold what has finished; they write it when an iteration takes it, or when it has waited for long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Final

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.sharing import NoFollowers, Serving
from areal_tasks.engines.watchdog import Heartbeat
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rollout.background import Background
from areal_tasks.rollout.book import Book
from areal_tasks.rollout.filters import mean_reward
from areal_tasks.rollout.judging import Unjudged
from areal_tasks.rollout.link import Link, Listener, WorkerLost
from areal_tasks.rollout.orders import (
    Begin,
    Broken,
    Cause,
    Down,
    Event,
    Failed,
    Finished,
    Generated,
    Lease,
    LeaseOver,
    Part,
    Rejected,
    Spooled,
    Written,
)  # fmt: skip
from areal_tasks.rollout.rejections import Rejections
from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.spooling import Place, Spool, Writer
from areal_tasks.store.backend import StoreError, Unavailable
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.sections import Rollout

log = logging.getLogger(__name__)

#: What an attempt that has failed for another reason than its workflow raises in the stage that takes groups.
ERRORS: Final[Mapping[Cause, Callable[[str], Exception]]] = {
    "servers": ServerDown, "verifiers": Unjudged, "mistake": UserError,
}  # fmt: skip


@dataclass(frozen=True)
class Where:
    """A worker that is at a group, or holds it, and the number of its lease."""

    link: Link
    number: int


@dataclass
class Rollouts:
    """The groups of one start of a run. All methods belong to the event loop of `client`, which keeps the servers.

    `order` tells what a worker is told first; `connect` gives a link to the one at an address. While
    `held`, no group begins but those that `take` waits for.
    """

    book: Book
    client: InferenceClient
    order: Callable[[], Begin]
    connect: Callable[[str, Listener], Link]
    limits: Rollout
    spool: Spool
    writer: Writer
    verdicts: list[VerifyResult] = field(default_factory=list)  # on groups, until somebody clears it
    held: threading.Event = field(default_factory=threading.Event)
    _taking: bool = False
    _links: dict[tuple[str, int], Link] = field(default_factory=dict)
    _where: dict[int, Where] = field(default_factory=dict)  # groups under way, or finished and not in the store
    _judged: set[int] = field(default_factory=set)  # groups that only verifiers are at any more
    _numbers: Iterator[int] = field(default_factory=count)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None  # what must end or repeat the stage that takes groups
    _recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    _serving: Serving | None = None  # as it was when the workers were last told
    _background: Background = field(default_factory=Background)

    def __post_init__(self) -> None:
        self.rejections = Rejections(self.limits)

    # ── what iterations take ────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, prefix: str) -> list[Written]:
        """The next iteration's groups, in order, as parts of its tables below `prefix`, as soon as the rule allows it.

        What filters have rejected is recorded by then: it has made room for these groups, and makes it again should the
        flow be killed.

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
            for attempt in count():
                parts = self._parts(await self._chosen(), prefix, attempt)
                await self._record(self.rejections.by_filters)
                written = await asyncio.gather(*(self._written(link, part) for link, part in parts))
                if all(written):
                    return [part for part in written if part is not None]
            raise AssertionError("count ends")
        finally:
            self._taking = False

    async def _chosen(self) -> list[int]:
        """The next iteration's groups, as soon as there are these, and a worker that can write them."""
        while (taken := self.book.take()) is None or not self._ready():
            if self._failure is not None:
                raise self._failure
            if taken is None and not self._where and 0 < len(self._links) == len(self._ready()):
                raise RuntimeError(f"iteration {self.book.next} waits for groups, and none is under way")
            self._news.clear()
            await self._news.wait()
        return [group.index for group in taken]

    def _ready(self) -> list[Link]:
        return [link for link in self._links.values() if link.ready]

    def _parts(self, groups: Sequence[int], prefix: str, attempt: int) -> list[tuple[Link, Part]]:
        """Who writes what: as few parts as there can be, each of groups that follow one another."""
        holder, holders = self._ready()[0], list[tuple[int, Link]]()
        for group in groups:
            holder = self._where[group].link if group in self._where else holder
            holders.append((group, holder))
        runs = [(link, [group for group, _ in run]) for link, run in groupby(holders, lambda held: held[1])]
        several = attempt or len(runs) > 1
        labels = [f"-{attempt}-{i}" if several else "" for i in range(len(runs))]
        return [(link, self._part(prefix, label, run)) for label, (link, run) in zip(labels, runs, strict=True)]

    def _part(self, prefix: str, label: str, groups: Sequence[int]) -> Part:
        stored = tuple(group for group in groups if group not in self._where)
        return Part(
            prefix=prefix,
            label=label,
            numbers=tuple(self._where[group].number for group in groups if group in self._where),
            groups=stored,
            records=tuple(self.spool.records(stored)),
        )

    async def _written(self, link: Link, part: Part) -> Written | None:
        """A part that a worker has written; None where some of its groups begin again."""
        try:
            return await link.write(part)
        except Unavailable:
            raise
        except WorkerLost:
            self.lost(link)
        except LeaseOver:
            self._lose({group for group, where in self._where.items() if where.number in part.numbers})
        except StoreError as error:
            if not part.groups:
                raise
            log.warning("groups %s begin again, since the spool is damaged: %s", list(part.groups), error)
            self._lose(part.groups)
        return None

    def consume(self, indices: Sequence[int]) -> None:
        """The next iteration has committed these groups."""
        self.rejections.told()
        self._forget([*indices, *self.book.consume(indices)])
        self.begin()

    def _lose(self, groups: Collection[int]) -> None:
        """These groups begin again, through no fault of their own."""
        for group in groups:
            self.book.withdraw(group)
        self._forget(groups)
        self.begin()

    def _forget(self, groups: Collection[int]) -> None:
        self.spool.forget(groups)
        for group in groups:
            self._leave(group)

    def _leave(self, group: int) -> None:
        """No worker is at the group any more, or holds it."""
        self._judged.discard(group)
        if (where := self._where.pop(group, None)) is not None:
            where.link.take_back([where.number])

    async def settled(self) -> tuple[Settled, list[Place]]:
        """Which groups are settled, and where in the spool others are.

        Groups that have failed are recorded with the commit that counts them, just before it: if a mistake of the
        workflow ends the run, they begin again once it is corrected.
        """
        settled = self.book.settled
        await self._record(lambda: self.rejections.unrecorded)
        return settled, self.spool.places()

    async def _record(self, rejected: Callable[[], Mapping[int, RejectedGroup]]) -> None:
        """Record rejected groups, which are asked for when those before are recorded."""
        async with self._recording:
            if groups := list(rejected().values()):
                for record in await asyncio.to_thread(self.writer.write, {}, groups):
                    self.spool.note(record, ())
                self.rejections.record(group.index for group in groups)

    async def flush(self) -> None:
        """Record what has finished, or was rejected by a filter, and is not in the store yet."""
        await asyncio.gather(*(link.flush() for link in self._ready()), self._record(self.rejections.by_filters))

    async def close(self) -> None:
        """Give up the groups under way, and leave those that wait in the store."""
        self._failure = RuntimeError("the groups were given up")  # no other begins
        self.client.followers = NoFollowers()
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), self._record(self.rejections.by_filters))

    # ── the workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def have(self, starts: Collection[tuple[str, int]]) -> None:
        """Have exactly these starts of workers, by their addresses, from now on."""
        self.client.followers = self
        for start in self._links.keys() - set(starts):
            link = self._links.pop(start)
            await link.drop()
            self.lost(link)
        for start in starts:
            if start not in self._links:
                self._links[start] = self.connect(start[0], self)

    async def heartbeats(self) -> dict[str, Heartbeat]:
        """How the workers get on, by their addresses: they answer, whatever becomes of their groups."""
        groups, links = Counter(where.link for where in self._where.values()), list(self._links.values())
        found = await asyncio.gather(*(link.look() for link in links))
        return {
            link.url: Heartbeat(heartbeat, f"{groups[link]} groups")
            for link, heartbeat in zip(links, found, strict=True)
        }

    def begun(self, link: Link) -> None:
        """It generates from now on."""
        self._news.set()
        self._background.do(self.told())
        self.begin()

    def lost(self, link: Link) -> None:
        """What a worker was given, and did not leave in the store, begins again."""
        link.ready = False
        if lost := [group for group, where in self._where.items() if where.link is link]:
            log.warning("%d groups begin again: the rollout worker at %s is gone", len(lost), link.url)
        for group in lost:
            self._leave(group)
            self.book.withdraw(group)
        if link.start is not None:
            start, link.start = link.start, None
            self._background.store(0.0, lambda: True, lambda: self._close(start), self._end)
        self._news.set()
        self.begin()

    async def _close(self, start: int) -> None:
        """Whatever the process still does that has opened this start of the spool, it records nothing more."""
        await asyncio.to_thread(self.spool.close, start)

    def failed(self, link: Link, error: Exception) -> None:
        """A worker cannot do what it is told."""
        self._end(error)

    def heard(self, link: Link, event: Event) -> None:
        """Something has happened at a worker."""
        if isinstance(event, Broken):
            self._end(UserError(event.reason))
        elif isinstance(event, Down):
            self._background.do(self.client.evict({event.url: event.reason}))
        elif isinstance(event, Spooled):
            self._spooled(link, event)
        elif self._where.get(event.index) != Where(link, event.number):
            link.take_back([event.number])
        else:
            self._came(event)
        self._news.set()
        self.begin()

    def _came(self, event: Generated | Finished | Rejected | Failed) -> None:
        """Something has become of a group."""
        if isinstance(event, Generated):
            self._judged.add(event.index)
            return
        if isinstance(event, Failed):
            self._fail(event)
            return
        self._judged.discard(event.index)
        self.verdicts += event.verdicts
        if isinstance(event, Finished):
            self.book.finish(event.index, event.version)
            self.rejections.keep()
        else:
            self._leave(event.index)
            self._reject(event.index, event.reason, mean_reward(event.verdicts))
            self._background.store(
                self.limits.flush_seconds,
                lambda: event.index in self.rejections.by_filters(),
                lambda: self._record(self.rejections.by_filters),
                self._end,
            )

    def _spooled(self, link: Link, event: Spooled) -> None:
        """Groups are in the store, and no worker holds them."""
        link.start = event.record.start
        link.take_back(list(event.numbers))
        groups = {group.index for group in event.record.finished}
        mine = [g for g in groups if (w := self._where.get(g)) and w.link is link and w.number in event.numbers]
        for group in mine:
            del self._where[group]
        self.spool.note(event.record, mine)

    def _fail(self, event: Failed) -> None:
        """Failed servers or verifiers, and a user's mistake, end the stage; all else costs the group an attempt."""
        self._leave(event.index)
        if event.cause != "workflow":
            self.book.withdraw(event.index)
            self._end(ERRORS[event.cause](event.reason))
            return
        attempts = self.book.fail(event.index)
        level = logging.WARNING if self.book.failures.total() == 1 or self._is_last(attempts) else logging.DEBUG
        log.log(level, "group %d, attempt %d: %s", event.index, attempts, event.reason)
        if self._is_last(attempts):
            self._reject(event.index, f"failed: {event.reason}")

    def _reject(self, index: int, reason: str, reward: float | None = None) -> None:
        """A group will not be trained on."""
        self.book.reject(index)
        failure = self.rejections.add(RejectedGroup(index=index, reason=reason, reward=reward))
        self._failure = self._failure or failure

    def _is_last(self, attempts: int) -> bool:
        return attempts >= self.limits.group_attempts

    def _end(self, error: BaseException) -> None:
        self._failure = error
        self._news.set()

    def begin(self) -> None:
        """Begin as many groups as the rule admits now, each worker's in a row; not before new workers are ready."""
        links = self._ready()
        starting = any(not link.tried for link in self._links.values())
        if (version := self.client.version) is None or self._failure is not None or starting or not links:
            return
        generating = (g for g, live in self.book.live.items() if not live.finished and g not in self._judged)
        held = Counter(self._where[group].link for group in generating)
        most = self.client.capacity - held.total()
        if self.held.is_set():
            most = min(most, self.book.short()) if self._taking else 0
        begun = self.book.lease(version, most)
        share = -(-len(begun) // len(links))
        for i, link in enumerate(sorted(links, key=lambda link: held[link])):
            mine = begun[i * share : (i + 1) * share]
            leases = [Lease(number=next(self._numbers), index=index, floor=version) for index in mine]
            self._where |= {lease.index: Where(link, lease.number) for lease in leases}
            if leases:
                link.give(leases)

    # ── the servers that the workers generate on, as `areal_tasks.engines.sharing.Followers` ────────────────────────

    def changed(self) -> None:
        """Workers are told at once what has changed of the servers; it is not waited for."""
        if (serving := self.client.serving) != self._serving:
            self._serving = serving
            self._background.do(self.told())

    async def told(self) -> None:
        """Return when all workers know which servers may generate."""
        serving = self.client.serving
        await asyncio.gather(*(link.tell(serving) for link in self._links.values()))

    async def busy(self) -> Mapping[str, int]:
        """The workers' requests under way, by the server's address."""
        found = await asyncio.gather(*(link.requests() for link in self._links.values()))
        return sum(map(Counter, found), Counter[str]())

    def under_way(self) -> Mapping[str, int]:
        """The same, as the workers were last looked at."""
        return sum((Counter(link.busy) for link in self._links.values()), Counter[str]())


def recover(book: Book, spool: Spool) -> list[RejectedGroup]:
    """Enter into the book what earlier starts of the flow have left in the spool. Returns what they have rejected."""
    waiting, rejected = spool.recover(book.settled)
    for group in rejected:
        book.reject(group.index)
    kept = book.restore(waiting)
    spool.forget({group.index for group in waiting} - {group.index for group in kept})
    if waiting:
        log.info("%d groups that had finished are in the store; %d of them can be used", len(waiting), len(kept))
    return rejected
