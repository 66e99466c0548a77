"""Groups that were in flight when their rollout worker ended: the code of one of them may have ended it.

They begin again apart from other groups. If their worker ends once more, they begin again in halves, until the group
that ends its worker is alone with it: that counts against this group, while the others finish. The suspicion is kept in
memory only: after a crash of the flow, all groups begin again as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

W = TypeVar("W", bound=Hashable)


@dataclass
class Suspects:
    """The suspected groups of one start of the flow. `together`: how many of them a worker may generate at a time."""

    together: dict[int, int] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)  # of workers that generated only this group

    def __contains__(self, group: int) -> bool:
        return group in self.together

    def worker_ended(self, groups: Sequence[int]) -> None:
        """A worker has ended with these groups in flight."""
        self.together |= dict.fromkeys(groups, max(1, len(groups) // 2))
        if len(groups) == 1:
            self.ends.update(groups)

    def clear(self, group: int) -> None:
        """An attempt at the group is over, and its worker still runs; or the group will not begin again."""
        self.together.pop(group, None)

    def place(
        self, waiting: Sequence[int], running: Mapping[W, int], suspecting: Collection[W]
    ) -> tuple[dict[W, list[int]], list[W]]:
        """Which of the `waiting` groups that are suspects each worker is to begin, and which workers may have others.

        `running` are the numbers of the workers' groups in flight, `suspecting` the workers that have suspects.
        Suspects go to workers that have no group, the fewest together first, and other groups to workers that have no
        suspect. While no worker has suspects, the one with the fewest groups gets no more, so that it can take them.
        """
        suspects = sorted((group for group in waiting if group in self), key=lambda group: self.together[group])
        shares: dict[W, list[int]] = {}
        for worker, groups in running.items():
            if suspects and not groups:
                most = self.together[suspects[0]]
                shares[worker], suspects = suspects[:most], suspects[most:]
        apart = shares.keys() | set(suspecting)
        free = sorted((worker for worker in running if worker not in apart), key=lambda worker: running[worker])
        return shares, free if apart or not suspects else free[1:]
