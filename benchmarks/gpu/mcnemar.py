"""McNemar's exact test: did a second model answer more of the same questions than the first?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Paired:
    """Counts over the questions that both answered, and the two-sided p of the exact test."""

    questions: int
    first: int  # right in the first
    second: int  # right in the second
    gained: int  # wrong in the first, right in the second
    lost: int  # right in the first, wrong in the second
    p: float


def compare(first: Mapping[int, bool], second: Mapping[int, bool]) -> Paired:
    """The test over the questions (ids) that both hold. McNemar 1947; exact: binomial(gained + lost, 1/2)."""
    both = first.keys() & second.keys()
    gained = sum(second[q] and not first[q] for q in both)
    lost = sum(first[q] and not second[q] for q in both)
    right = [sum(bool(answers[q]) for q in both) for answers in (first, second)]
    return Paired(len(both), right[0], right[1], gained, lost, exact_p(gained, lost))


def exact_p(gained: int, lost: int) -> float:
    """Two-sided: twice the smaller tail, at most 1."""
    n, smaller = gained + lost, min(gained, lost)
    return min(1.0, 2 * sum(comb(n, k) for k in range(smaller + 1)) / 2**n)
