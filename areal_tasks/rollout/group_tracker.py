"""The flow's record of live groups: the weights version that each began with, and whether it has finished.

The tracker admits groups by the staleness rule and selects those that an iteration takes. It uses no clock, network or
store. The cost of its methods that are called for every group does not depend on the number of live groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count

from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.staleness import Staleness, Versions


@dataclass
class GroupTracker:
    """The groups of one start of the flow. `next` is the next iteration to take groups.

    Live groups are either `running` (begun, not finished), with the lowest version that their servers may hold; or
    `finished` and not taken by an iteration, with the version of their oldest token.
    """

    rule: Staleness
    next: int
    settled: SettledGroups = field(default_factory=SettledGroups)
    pace: int | None = None  # groups that may be live beyond what the next iteration takes; None: as the rule admits
    running: Versions = field(default_factory=Versions)
    finished: Versions = field(default_factory=Versions)
    failures: Counter[int] = field(default_factory=Counter)  # failed attempts per group
    _lowest: int = 0  # every group below is live or settled
    _taken: Versions = field(default_factory=Versions)  # groups that the next iteration takes, while it writes them

    def live(self) -> int:
        """The number of live groups. May be called from another thread."""
        return len(self.running.of) + len(self.finished.of)

    def __contains__(self, group: int) -> bool:
        """Whether the group is live."""
        return group in self.running.of or group in self.finished.of

    def version(self, group: int) -> int:
        """The version of a live group."""
        return (self.running if group in self.running.of else self.finished).of[group]

    def lease(self, version: int, most: float = math.inf) -> list[int]:
        """Admit up to `most` groups, lowest first, to begin on servers that hold at least `version`. Returns them."""
        if self.pace is not None:
            most = min(most, self.short() + self.pace)
        if most <= 0:
            return []
        begun = self._missing(int(min(self._room(version), most)))
        for group in begun:
            self.running.add(group, version)
        return begun

    def _room(self, version: int) -> int:
        """How many more groups may begin on servers that hold `version`, once `_taken` is consumed."""
        return self.rule.room(self.next + bool(self._taken.of), self._versions() - self._taken.counts, version)

    def _missing(self, number: int) -> list[int]:
        """The lowest groups that are neither live nor settled."""
        found: list[int] = []
        for group in count(max(self._lowest, self.settled.prefix)):
            self._lowest = group
            if len(found) >= number:
                break
            if group not in self and group not in self.settled:
                found.append(group)
        return found

    def short(self) -> int:
        """The batch size of the next iteration minus the number of live groups."""
        return self.rule.batch(self.next) - self.live()

    def restore(self, waiting: Mapping[int, int]) -> list[int]:
        """Make those of `waiting` that can be used, groups that an earlier start finished, the only live groups.

        `waiting`: their versions. Returns the others, which are not live.
        """
        self._forget_live()
        return self._keep(self.finished, waiting)

    def change_rule(self, rule: Staleness) -> tuple[list[int], list[int]]:
        """Apply another rule. Returns the running and the finished groups for which it has no room: they are not live.

        It keeps as many finished groups as possible, then as many running ones.
        """
        running, finished = self._forget_live()
        self.rule = rule
        without = self._keep(self.finished, finished)
        return self._keep(self.running, running), without

    def _forget_live(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Make no group live. Returns the versions of the groups that were running and of those that were finished."""
        before = self.running.of, self.finished.of
        self.running, self.finished, self._taken, self._lowest = Versions(), Versions(), Versions(), 0
        return before

    def _keep(self, kept: Versions, groups: Mapping[int, int]) -> list[int]:
        """Add to `kept` the groups that can be used, oldest first. Returns the others."""
        left = []
        for group, version in sorted(groups.items(), key=lambda item: (item[1], item[0])):
            if self._usable(version):
                kept.add(group, version)
            else:
                left.append(group)
        return left

    def _usable(self, version: int) -> bool:
        """Whether the next iteration, or one after it, may take a group that began with `version`."""
        if self.rule.rule == "admission":
            live, batches = self.live(), map(self.rule.batch, range(self.next, self.rule.last + 1))
            return version <= self.next and any(taken > live for taken in accumulate(batches))
        return version <= self.next and self.rule.room(self.next, self._versions(), version) > 0

    def finish(self, index: int, version: int) -> None:
        """Record that a running group has finished; `version` is that of its oldest token."""
        self.running.remove(index)
        self.finished.add(index, version)

    def withdraw(self, index: int) -> None:
        """Abandon a group without counting a failed attempt. Unless it is settled, it begins again."""
        self._remove(index)
        self._lowest = min(self._lowest, index)

    def fail(self, index: int) -> int:
        """Count a failed attempt at a group, which begins again. Returns its number of failed attempts."""
        self.withdraw(index)
        self.failures[index] += 1
        return self.failures[index]

    def reject(self, index: int) -> None:
        """Settle a group that will not be trained on: it does not begin again."""
        self._remove(index)
        self.settled = self.settled.add([index])

    def ready(self) -> int:
        """The number of finished groups that no iteration has taken. May be called from another thread."""
        return len(self.finished.of)

    def take(self) -> list[int] | None:
        """The groups of the next iteration, in order; None while it must wait for groups.

        Until they are consumed, or one of them is no longer live, others begin as if they were consumed.
        """
        taken = self.rule.take(self.next, self.finished, self.running.counts)
        self._taken = Versions()
        for group in taken or ():
            self._taken.add(group, self.finished.of[group])
        return taken

    def consume(self, indices: Iterable[int]) -> list[int]:
        """Record that the next iteration has committed these groups. Returns live groups that are dropped: too old now.

        There are such groups only if another start of the flow chose the committed ones. They begin again.
        """
        taken, self._taken = list(indices), Versions()
        for index in taken:
            self._remove(index)
        self.settled = self.settled.add(taken)
        self.next += 1
        dropped = []
        while self.rule.rule == "strict" and self.live() and not self.rule.holds(self.next, self._versions()):
            live = self.running.of | self.finished.of
            dropped.append(min(live, key=lambda index: (live[index], -index)))
            self.withdraw(dropped[-1])
        return dropped

    def _remove(self, index: int) -> None:
        if index in self._taken.of:
            self._taken = Versions()
        self.running.remove(index)
        self.finished.remove(index)

    def _versions(self) -> Counter[int]:
        """The number of live groups by version."""
        return self.running.counts + self.finished.counts
