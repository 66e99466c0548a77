"""Finding the end of a numbered sequence without listing it."""

from __future__ import annotations

from collections.abc import Callable


def last_present(present: Callable[[int], bool], first: int = 0) -> int:
    """The last number from `first` on that is present, or `first - 1`; numbers are present without gaps.

    Gallops, then bisects: O(log n) calls of `present`.
    """
    step = 1
    while present(first + step - 1):
        step *= 2
    low, high = first + step // 2 - 1, first + step - 1  # low is present (or first - 1), high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if present(middle) else (low, middle)
    return low
