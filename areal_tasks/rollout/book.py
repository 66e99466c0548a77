"""The flow's record of live groups: which weights each began with, and whether it has finished.

The book admits groups by the staleness rule and selects those that an iteration takes. It uses no clock, network or
store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.staleness import Finished, Staleness


@dataclass(frozen=True)
class Live:
    """A group that has begun and is not settled. `version`: of its oldest token, or its floor until it has finished."""

    version: int
    finished: bool = False


@dataclass
class Book:
    """The groups of one start of the flow. `next` is the next iteration to take groups."""

    rule: Staleness
    next: int
    settled: Settled = field(default_factory=Settled)
    pace: int | None = None  # groups that may be live beyond what the next iteration takes; None: as the rule admits
    live: dict[int, Live] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # failed attempts per group

    def lease(self, version: int, most: float = math.inf) -> list[int]:
        """Admit up to `most` groups, lowest first, to begin on servers that hold at least `version`. Returns them."""
        room = min(self.rule.room(self.next, self._versions(), version), most)
        if self.pace is not None:
            room = min(room, self.short() + self.pace)
        missing = (index for index in self.settled.missing() if index not in self.live)
        begun = list(islice(missing, max(int(room), 0)))
        self.live |= dict.fromkeys(begun, Live(version))
        return begun

    def short(self) -> int:
        """How many groups the next iteration takes, less those that are live."""
        return self.rule.batch(self.next) - len(self.live)

    def restore(self, waiting: Iterable[Finished]) -> list[Finished]:
        """Enter groups that an earlier start finished. Returns those that can be used; the others begin again."""
        kept = []
        for group in sorted(waiting, key=lambda group: (group.version, group.index)):
            if group.index not in self.settled and self._usable(group.version):
                self.live[group.index] = Live(group.version, finished=True)
                kept.append(group)
        return kept

    def follow(self, rule: Staleness) -> dict[int, Live]:
        """Apply another rule. Returns the groups that are no longer live, because it has no room for them.

        It keeps as many as it has room for: as many finished ones as possible, then as many others.
        """
        before, self.live, self.rule = self.live, {}, rule
        for index, group in sorted(before.items(), key=lambda item: (not item[1].finished, item[1].version, item[0])):
            if self._usable(group.version):
                self.live[index] = group
        return {index: group for index, group in before.items() if index not in self.live}

    def _usable(self, version: int) -> bool:
        """Whether the next iteration, or one after it, may take a group that began with `version`."""
        if self.rule.rule == "admission":
            return version <= self.next
        return version <= self.next and self.rule.room(self.next, self._versions(), version) > 0

    def finish(self, index: int, version: int) -> None:
        """A running group has finished; `version` is that of its oldest token."""
        self.live[index] = Live(version, finished=True)

    def withdraw(self, index: int) -> None:
        """Abandon a group without counting a failed attempt. Unless it is settled, it begins again."""
        self.live.pop(index, None)

    def fail(self, index: int) -> int:
        """An attempt at a group failed, and the group begins again. Returns its number of failed attempts."""
        self.withdraw(index)
        self.failures[index] += 1
        return self.failures[index]

    def reject(self, index: int) -> None:
        """A group will not be trained on, and does not begin again."""
        self.live.pop(index, None)
        self.settled = self.settled.add([index])

    def ready(self) -> int:
        """Finished groups that no iteration has taken. May be called from another thread."""
        return sum(live.finished for live in list(self.live.values()))

    def take(self) -> list[Finished] | None:
        """The groups of the next iteration, in order of their numbers; None while it must wait for groups."""
        finished = [Finished(index, live.version) for index, live in self.live.items() if live.finished]
        running = [live.version for live in self.live.values() if not live.finished]
        return self.rule.take(self.next, finished, running)

    def consume(self, indices: Iterable[int]) -> list[int]:
        """The next iteration has committed these groups. Returns live groups that are dropped and begin again.

        Only if another start of the flow chose the groups can there be any: live groups that are too old without them.
        """
        taken = list(indices)
        for index in taken:
            self.live.pop(index, None)
        self.settled = self.settled.add(taken)
        self.next += 1
        dropped = []
        while self.rule.rule == "strict" and self.live and not self.rule.holds(self.next, self._versions()):
            dropped.append(min(self.live, key=lambda index: (self.live[index].version, -index)))
            del self.live[dropped[-1]]
        return dropped

    def _versions(self) -> list[int]:
        return [live.version for live in self.live.values()]
