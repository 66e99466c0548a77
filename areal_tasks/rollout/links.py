"""The flow's clients of all rollout workers of a run (links), and which worker generates or holds each group."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Final, Literal, get_args

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.sharing import Followers, Serving
from areal_tasks.engines.watchdog import Heartbeat
from areal_tasks.rollout.background import Background
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.orders import Lease, Part
from areal_tasks.store.backend import StoreError
from schemas.manifest import SpoolRecord
from schemas.recipe.sections import Rollout

#: How long an iteration waits while no group can begin because the store takes no finished ones.
FULL_SECONDS: Final = 600.0

#: The records of the spool that hold the rows of these groups.
Records = Callable[[Sequence[int]], Sequence[SpoolRecord]]


#: The state of an assigned group; a finished one is held in the worker's memory until it is written.
State = Literal["generating", "verifying", "held"]


@dataclass(frozen=True)
class Assignment:
    """The worker that generates or holds a group, and the number of its lease."""

    link: Link
    number: int
    state: State = "generating"


@dataclass
class Assignments:
    """The assignment of each running group, and of each finished one whose rows are not in the store.

    The cost of methods that are called for every group depends only on the groups that they are given, or return.
    """

    by_group: dict[int, Assignment] = field(default_factory=dict)
    _counts: Counter[tuple[Link, State]] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=count)

    def __contains__(self, group: int) -> bool:
        return group in self.by_group

    def __len__(self) -> int:
        return len(self.by_group)

    def give(self, link: Link, floors: Mapping[int, int], suspect: bool) -> None:
        """Lease groups to a worker, each with its floor."""
        leases = [
            Lease(number=next(self._numbers), index=group, floor=floor, suspect=suspect)
            for group, floor in floors.items()
        ]
        for lease in leases:
            self._add(lease.index, Assignment(link, lease.number))
        if leases:
            link.give(leases)

    def enter(self, group: int, state: State) -> None:
        """Note the new state of an assigned group."""
        self._add(group, replace(self.remove(group), state=state))

    def end(self, group: int) -> None:
        """End the group's lease, if it has one, and notify its worker."""
        if group in self:
            assignment = self.remove(group)
            assignment.link.take_back([assignment.number])

    def remove(self, group: int) -> Assignment:
        """Remove the assignment of a group that its worker no longer has."""
        assignment = self.by_group.pop(group)
        counted = assignment.link, assignment.state
        self._counts[counted] -= 1
        if not self._counts[counted]:
            del self._counts[counted]  # else links to workers that have ended would be kept
        return assignment

    def leased(self, group: int, link: Link, number: int) -> bool:
        """Whether the worker has the group, by the lease of this number."""
        assignment = self.by_group.get(group)
        return assignment is not None and assignment.link is link and assignment.number == number

    def of(self, link: Link, numbers: Collection[int] | None = None) -> list[int]:
        """The groups of a worker; only those of the leases `numbers`, if given."""
        wanted = None if numbers is None else set(numbers)
        mine = ((group, one.number) for group, one in self.by_group.items() if one.link is link)
        return [group for group, number in mine if wanted is None or number in wanted]

    def running(self, link: Link) -> int:
        """How many groups a worker generates or verifies."""
        return self._counts[link, "generating"] + self._counts[link, "verifying"]

    def describe(self, link: Link) -> str:
        """`groups: 3 generating, 2 held`."""
        counts = ((self._counts[link, state], state) for state in get_args(State))
        return f"groups: {', '.join(f'{n} {state}' for n, state in counts if n) or 'none'}"

    def work_limit(self, link: Link, limits: Rollout) -> str:
        """What ends the work on a worker's groups, however well the worker itself answers."""
        found = []
        if self._counts[link, "generating"]:
            found.append(f"{limits.group_seconds:g} s for each attempt at a group (group_seconds)")
        if self._counts[link, "verifying"]:
            found.append("reward.wall_seconds for each verdict")
        if self.only_writes(link, limits.groups_in_memory):
            found.append(f"{FULL_SECONDS:g} s until the store takes finished groups")
        return "; ".join(found)

    def is_full(self, link: Link, most: int) -> bool:
        """Whether a worker has `most` groups, one at least, that it verifies, or has to write before it gets others."""
        return self._counts[link, "held"] + self._counts[link, "verifying"] >= max(most, 1)

    def only_writes(self, link: Link, most: int) -> bool:
        """Whether a worker generates nothing, and gets no groups before it has written those that it holds."""
        held = self._counts[link, "held"]
        return not self.running(link) and (self.is_full(link, most) or bool(held and link.leaving))

    def in_blocks(self, groups: Iterable[int], links: Sequence[Link], size: int) -> dict[Link, list[int]]:
        """The groups that each of these workers is to begin, such that an iteration's groups are in few parts.

        A group goes to the worker of the group before it, up to `size` consecutive ones, else to the one with the
        fewest.
        """
        shares: dict[Link, list[int]] = {}
        holders: dict[int, Link] = {}
        running = {link: self.running(link) for link in links}
        for group in sorted(groups) if links else ():
            before = holders.get(group - 1) or (self.by_group[group - 1].link if group - 1 in self else None)
            if before is None or before not in running or group % size == 0:
                before = min(links, key=running.__getitem__)
            holders[group] = link = before
            shares.setdefault(link, []).append(group)
            running[link] += 1
        return shares

    def by_url(self, state: State) -> Counter[str]:
        """How many groups are in a state, by address of the worker. May be called from any thread."""
        found = Counter[str]()
        for (link, of), number in list(self._counts.items()):
            if of == state:
                found[link.url] += number
        return found

    def _add(self, group: int, assignment: Assignment) -> None:
        self.by_group[group] = assignment
        self._counts[assignment.link, assignment.state] += 1

    def parts(
        self,
        groups: Sequence[int],
        default: Link,
        prefix: str,
        attempt: int,
        records: Records,
    ) -> list[tuple[Link, Part]]:
        """The parts of an iteration and the worker that writes each: as few as possible, each of consecutive groups.

        Groups whose rows are in the store, in these `records`, are written by the worker of the groups before them.
        """
        holder, holders = default, list[tuple[int, Link]]()
        for group in groups:
            holder = self.by_group[group].link if group in self else holder
            holders.append((group, holder))
        runs = [(link, [group for group, _ in run]) for link, run in groupby(holders, lambda held: held[1])]
        several = attempt or len(runs) > 1
        labels = [f"-{attempt}-{i}" if several else "" for i in range(len(runs))]
        return [
            (link, self._part(prefix, label, run, records)) for label, (link, run) in zip(labels, runs, strict=True)
        ]

    def _part(self, prefix: str, label: str, groups: Sequence[int], records: Records) -> Part:
        stored = tuple(group for group in groups if group not in self)
        return Part(
            prefix=prefix,
            label=label,
            numbers=tuple(self.by_group[group].number for group in groups if group in self),
            groups=stored,
            records=tuple(records(stored)),
        )


@dataclass(eq=False)
class Links(Followers):
    """The links, by start of a worker: (address, restart). As `Followers` they follow `client`.

    `served` is called soon after other servers may generate, or hold other weights.
    """

    client: InferenceClient
    background: Background
    served: Callable[[], None]
    by_start: dict[tuple[str, int], Link] = field(default_factory=dict)
    _serving: Serving | None = None  # as last sent to the workers

    def ready(self) -> list[Link]:
        """Links to workers that may be given groups, or write them."""
        return [link for link in self.by_start.values() if link.ready and not link.leaving]

    def with_room(self, assigned: Assignments, most: int) -> list[Link]:
        """Links to workers that may be given groups: those that do not hold `most` finished ones."""
        return [link for link in self.ready() if not assigned.is_full(link, most)]

    def left(self, assigned: Assignments) -> list[Link]:
        """Links to workers that are leaving, to be restarted, and have no groups left."""
        leaving = (link for link in self.by_start.values() if link.ready and link.leaving and not link.retired)
        return [link for link in leaving if not assigned.of(link)]

    def leave(self, assigned: Assignments, starts: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
        """Give these workers no further groups. Returns those that no longer hold any."""
        links = {start: link for start in starts if (link := self.by_start.get(start)) is not None}
        for link in links.values():
            if not link.retired:
                link.leaving = link.retired = True
                self.background.do(link.leave())
        return [start for start in starts if start not in links or not assigned.of(links[start])]

    @property
    def starting(self) -> bool:
        """Whether a worker is still starting: it has neither become ready nor failed to."""
        return any(not link.tried for link in self.by_start.values())

    async def heartbeats(self, assigned: Assignments, limits: Rollout) -> dict[str, Heartbeat]:
        """The workers' heartbeats by address: an answer is one, whatever the progress of the worker's groups."""
        links = list(self.by_start.values())
        found = await asyncio.gather(*(link.heartbeat() for link in links))
        return {
            link.url: Heartbeat(
                heartbeat,
                "; ".join(filter(None, [assigned.describe(link), link.busy.store])),
                work_limit=assigned.work_limit(link, limits),
            )
            for link, heartbeat in zip(links, found, strict=True)
        }

    def check_room(self, assigned: Assignments, most: int, since: float) -> float:
        """`since`, the time of the last check that found a group under way, or room for one; now, if this one does.

        StoreError if that is `FULL_SECONDS` ago: the store takes no finished groups.
        """
        ready, now = [link for link in self.by_start.values() if link.ready], time.monotonic()
        if not all(assigned.only_writes(link, most) for link in ready) or not ready:
            return now
        if now - since < FULL_SECONDS:
            return since
        why = "; ".join({link.busy.store for link in ready if link.busy.store}) or "their logs say why"
        raise StoreError(
            f"the rollout workers get no groups before they have written those that they hold "
            f"(rollout.groups_in_memory = {most}), and could not write them for {FULL_SECONDS:g} s: {why}"
        )

    def changed(self) -> None:
        """Send the workers the servers that may generate, without waiting for the acknowledgements."""
        if (serving := self.client.serving) != self._serving:
            self._serving = serving
            self.background.do(self.acknowledged())
            asyncio.get_running_loop().call_soon(self.served)

    async def acknowledged(self) -> None:
        """Return when all workers have acknowledged which servers may generate."""
        serving = self.client.serving
        await asyncio.gather(*(link.follow(serving) for link in self.by_start.values()))

    async def busy(self) -> Mapping[str, int]:
        """The workers' requests in flight, by server address."""
        found = await asyncio.gather(*(link.requests() for link in self.by_start.values()))
        return sum(map(Counter, found), Counter[str]())

    def under_way(self) -> Mapping[str, int]:
        """The same, as of the workers' last heartbeats."""
        return sum((Counter(link.busy.requests) for link in self.by_start.values()), Counter[str]())
