"""The staleness rule: which groups may begin, and which of them an iteration takes.

Weights version v is what iterations 0 … v-1 have made, and iteration k trains version k. A group whose oldest token was
sampled by version u may be trained on by iterations u … u + η: u + η is its deadline; where η differs between
iterations, the last one up to which each allows its lag. It is live from its beginning until it is consumed or
rejected. With B_j groups taken by iteration j, the invariant is

    I(k):  no live deadline is below k, and for every j ≥ k
           at most B_k + … + B_j live groups have a deadline ≤ j,

where k is the next iteration to take groups: Hall's condition for a schedule that meets every deadline. A group begins
only if I(k) holds with it, and iteration k takes groups only if I(k + 1) holds for the rest: none becomes too old, and
none is dropped for being slow. For constant B and groups begun in order this is AReaL's rule (arXiv:2505.24298, §5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Rule = Literal["strict", "admission"]


@dataclass
class Versions:
    """The version of each of some groups (`of`), and the number of groups by version (`counts`)."""

    of: dict[int, int] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, group: int, version: int) -> None:
        """Add a group, or replace its version."""
        self.remove(group)
        self.of[group] = version
        self.counts[version] += 1

    def remove(self, group: int) -> None:
        """Remove the group, if it is one of them."""
        if (version := self.of.pop(group, None)) is not None:
            self.counts[version] -= 1
            if not self.counts[version]:
                del self.counts[version]


@dataclass(frozen=True)
class Staleness:
    """The iterations of the run, with the η and the batch of each, as one rule. `last` is the run's last iteration.

    `admission` keeps only AReaL's bound on how many groups begin: a slow group may be older than η when it is used.
    """

    eta: Callable[[int], int]  # of an iteration
    last: int
    batch: Callable[[int], int]  # groups that an iteration takes
    rule: Rule = "strict"
    _deadlines: dict[int, int] = field(default_factory=dict, compare=False)  # by version, once known

    def deadline(self, version: int) -> int:
        """The last iteration that may train on a group whose oldest token is of `version`."""
        if version not in self._deadlines:
            last = version
            while last < self.last and last + 1 - version <= self.eta(last + 1):
                last += 1
            self._deadlines[version] = min(last, self.last)
        return self._deadlines[version]

    def capacity(self, k: int, j: int) -> int:
        """The number of groups that iterations k … j take in total."""
        return sum(map(self.batch, range(k, j + 1)))

    def holds(self, k: int, live: Mapping[int, int]) -> bool:
        """I(k); `live`: by version, the number of live groups whose oldest token is of it."""
        counts = self._counts(live)
        return all(d >= k and self._up_to(counts, d) <= self.capacity(k, d) for d in counts)

    def room(self, k: int, live: Mapping[int, int], version: int) -> int:
        """How many more groups may begin on a server that holds `version`; k is the next iteration to take groups."""
        deadline = self.deadline(version)
        if deadline < k:
            return 0
        counts = self._counts(live)
        if self.rule == "admission":
            return max(0, self.capacity(k, deadline) - counts.total())
        tight = [self.capacity(k, j) - self._up_to(counts, j) for j in {deadline, *counts} if j >= deadline]
        return max(0, min(tight))

    def take(self, k: int, finished: Versions, running: Mapping[int, int]) -> list[int] | None:
        """The groups that iteration k trains on, in order of their numbers; None if it must wait for running ones.

        `running`: by version of the oldest token, or floor, the number of groups that have not finished.
        """
        if len(finished.of) < self.batch(k):
            return None
        if self.rule == "strict" and not self.holds(k + 1, self._left(k, finished.counts) + Counter(running)):
            return None
        ordered = sorted(finished.of, key=lambda group: (self.deadline(finished.of[group]), group))
        return sorted(ordered[: self.batch(k)])

    def _left(self, k: int, finished: Mapping[int, int]) -> Counter[int]:
        """The numbers of finished groups by version after iteration k has taken those with the earliest deadlines."""
        left, to_take = Counter(finished), self.batch(k)
        for version in sorted(finished, key=self.deadline):
            taken = min(to_take, left[version])
            left[version], to_take = left[version] - taken, to_take - taken
        return +left

    def _counts(self, versions: Mapping[int, int]) -> Counter[int]:
        """The number of groups by deadline."""
        counts = Counter[int]()
        for version, number in versions.items():
            counts[self.deadline(version)] += number
        return counts

    @staticmethod
    def _up_to(counts: Mapping[int, int], deadline: int) -> int:
        return sum(n for d, n in counts.items() if d <= deadline)
