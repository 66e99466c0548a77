"""Many small waits at once: hashing and compression release the GIL, and so does the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def parallel(work: Callable[[A], B], items: Sequence[A], threads: int = 16) -> list[B]:
    """`work` on every item, in order. One item, the usual case, is spared the threads."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))
