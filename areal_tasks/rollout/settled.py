"""Which groups of a run are settled: consumed by an iteration, or rejected for good. All others are still needed.

Group i is prompt position i of the run, so the settled groups are the run's position in its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from schemas.manifest import IterationCommit


@dataclass(frozen=True)
class SettledGroups:
    """All groups below `prefix`, and those in `beyond`, none of which is below it or adjacent to it."""

    prefix: int = 0
    beyond: frozenset[int] = frozenset()

    def __contains__(self, index: int) -> bool:
        return index < self.prefix or index in self.beyond

    def add(self, indices: Iterable[int]) -> SettledGroups:
        """A copy in which these groups are settled, too."""
        beyond = set(self.beyond).union(index for index in indices if index >= self.prefix)
        prefix = self.prefix
        while prefix in beyond:
            beyond.remove(prefix)
            prefix += 1
        return SettledGroups(prefix, frozenset(beyond))

    def without(self, others: SettledGroups) -> Iterator[int]:
        """The groups that are settled in `self` and not in `others`, lowest first."""
        return (i for i in chain(range(others.prefix, self.prefix), sorted(self.beyond)) if i not in others)


def settled_after(head: IterationCommit | None) -> SettledGroups:
    """The groups that are settled after a commit; none before the first."""
    state: Mapping[str, Any] = head.state if head else {}
    return SettledGroups(int(state.get("next_group", 0)), frozenset(state.get("settled", ())))
