"""What the flow knows of every live group: which weights it began with, and whether it has finished.

The book admits groups by the staleness rule, and says which of them an iteration takes. It is pure bookkeeping: no
clock, no network, no store.
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
    """A group that has begun and is not settled. `version` is that of its oldest token, or its floor."""

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
    failures: Counter[int] = field(default_factory=Counter)  # attempts of a group that failed

    def lease(self, version: int, most: float = math.inf) -> list[int]:
        """Groups that begin now, on servers that hold at least `version`; those that are admitted, lowest first."""
        room = min(self.rule.room(self.next, self._versions(), version), most)
        if self.pace is not None:
            room = min(room, self.short() + self.pace)
        missing = (index for index in self.settled.missing() if index not in self.live)
        begun = list(islice(missing, max(int(room), 0)))
        self.live |= dict.fromkeys(begun, Live(version))
        return begun

    def short(self) -> int:
        """How many groups the next iteration takes beyond those that live."""
        return self.rule.batch(self.next) - len(self.live)

    def restore(self, waiting: Iterable[Finished]) -> list[Finished]:
        """Groups that an earlier start has finished. Returns those that can be used; the others begin again."""
        kept = []
        for group in sorted(waiting, key=lambda group: (group.version, group.index)):
            if group.index not in self.settled and self._usable(group.version):
                self.live[group.index] = Live(group.version, finished=True)
                kept.append(group)
        return kept

    def _usable(self, version: int) -> bool:
        """Whether the next iteration, or one after it, may take a group that has begun with `version`."""
        if self.rule.rule == "admission":
            return version <= self.next
        return version <= self.next and self.rule.room(self.next, self._versions(), version) > 0

    def finish(self, index: int, version: int) -> None:
        """A running group has finished; `version` is that of its oldest token."""
        self.live[index] = Live(version, finished=True)

    def withdraw(self, index: int) -> None:
        """A group is given up, through no fault of its own. Unless it is settled, it begins again."""
        self.live.pop(index, None)

    def fail(self, index: int) -> int:
        """An attempt at a group has failed and the group begins again; how many have failed so far."""
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
        """The next iteration has committed these groups. Returns groups that are given up, and begin again.

        There are none unless another start of the flow has chosen the groups: then some that are live may be too old.
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
