"""Groups that were in flight when their rollout worker ended: the user's code in one of them may have ended it.

They begin again, all at once, in a worker that generates no other groups. If that worker ends, too, they begin again in
two halves, and so on (a bisection) until the cause is alone in a worker: this end counts as a failure of the group, and
the others finish. A worker that something else has killed costs no more than its groups. Suspects are kept in memory
only: after a crash of the flow, all groups begin again as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

W = TypeVar("W", bound=Hashable)


@dataclass
class Suspects:
    """The suspects of one start of the flow. `at_once`: for each, how many suspects its worker may generate at once."""

    at_once: dict[int, int] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)  # by group: ends of workers that generated only this group

    def __contains__(self, group: int) -> bool:
        return group in self.at_once

    def worker_ended(self, groups: Sequence[int]) -> None:
        """Record that a worker has ended with these groups in flight."""
        again = any(group in self for group in groups)
        self.at_once |= dict.fromkeys(groups, max(1, len(groups) // 2) if again else len(groups))
        if len(groups) == 1:
            self.ends.update(groups)

    def clear(self, group: int) -> None:
        """No longer suspect a group: its worker outlived an attempt at it, or it will not begin again."""
        self.at_once.pop(group, None)

    def place(
        self, waiting: Sequence[int], running: Mapping[W, int], suspecting: Collection[W]
    ) -> tuple[dict[W, list[int]], list[W]]:
        """The suspects among `waiting` that each worker is to begin, and the workers that may begin other groups.

        `running` is the number of groups in flight by worker, `suspecting` the workers that have suspects. Suspects go
        to workers without groups, those with the smallest `at_once` first; other groups go to workers without suspects.
        While no worker has suspects, the one with the fewest groups gets no others, so that it can take the suspects.
        """
        suspects = sorted((group for group in waiting if group in self), key=lambda group: self.at_once[group])
        shares: dict[W, list[int]] = {}
        for worker, groups in running.items():
            if suspects and not groups:
                most = self.at_once[suspects[0]]
                shares[worker], suspects = suspects[:most], suspects[most:]
        reserved = shares.keys() | set(suspecting)
        free = sorted((worker for worker in running if worker not in reserved), key=lambda worker: running[worker])
        return shares, free if reserved or not suspects else free[1:]
