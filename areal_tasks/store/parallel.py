"""Many small waits at once: hashing and compression release the GIL, and so does the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def parallel(work: Callable[[A], B], items: Sequence[A], threads: int = 16) -> list[B]:
    """`work` on every item, in order. One item, the usual case, is spared the threads."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))


def in_background(work: Callable[[], B], name: str) -> Future[B]:
    """`work` in a thread that the end of the process does not wait for; what it raises is raised by `result`."""
    found: Future[B] = Future()
    found.set_running_or_notify_cancel()  # nothing takes it back

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


@contextmanager
def beside(work: Callable[[], B]) -> Iterator[Future[B]]:
    """`work` in another thread. On leaving it has ended; its error is raised then, also over another.

    Not over what ends the process, like a keyboard interrupt."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(work)
        try:
            yield found
        except Exception:
            found.result()  # what failed beside it is the cause
            raise
        found.result()
