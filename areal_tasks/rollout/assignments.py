"""Which rollout worker generates, or holds in its memory, which group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

from areal_tasks.rollout.link import Link
from areal_tasks.rollout.orders import Lease, Part
from schemas.manifest import SpoolRecord

#: The records of the spool that hold the rows of these groups.
Records = Callable[[Sequence[int]], Sequence[SpoolRecord]]


@dataclass(frozen=True)
class Assignment:
    """The worker that generates or holds a group, and the number of its lease."""

    link: Link
    number: int


@dataclass
class Assignments:
    """The assignment of each running group, and of each finished one whose rows are not in the store."""

    by_group: dict[int, Assignment] = field(default_factory=dict)
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
        self.by_group |= {lease.index: Assignment(link, lease.number) for lease in leases}
        if leases:
            link.give(leases)

    def end(self, group: int) -> None:
        """The group's lease is over, if it has one."""
        if (assignment := self.by_group.pop(group, None)) is not None:
            assignment.link.take_back([assignment.number])

    def of(self, link: Link, numbers: Collection[int] | None = None) -> list[int]:
        """The groups of a worker; only those of the leases `numbers`, if given."""
        mine = [(group, one.number) for group, one in self.by_group.items() if one.link is link]
        return [group for group, number in mine if numbers is None or number in numbers]

    def among(self, groups: Collection[int], links: Sequence[Link]) -> dict[Link, list[int]]:
        """Those of `groups` that each of these workers has."""
        found: dict[Link, list[int]] = {link: [] for link in links}
        for group in groups:
            if (one := self.by_group.get(group)) is not None and one.link in found:
                found[one.link].append(group)
        return found

    def parts(
        self,
        groups: Sequence[int],
        default: Link,
        prefix: str,
        attempt: int,
        records: Records,
    ) -> list[tuple[Link, Part]]:
        """Which worker writes which groups: as few parts as possible, each of consecutive groups.

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
