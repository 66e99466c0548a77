"""Work in threads: hashing, compression and waiting for the network release the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def parallel(work: Callable[[A], B], items: Sequence[A], threads: int = 16) -> list[B]:
    """`work` on every item, in threads; results in order. A single item, the usual case, needs no thread."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))


def in_background(work: Callable[[], B], name: str) -> Future[B]:
    """`work` in a daemon thread, in a copy of the caller's context; the future's `result` raises its error."""
    found, context = Future[B](), copy_context()
    found.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            found.set_result(context.run(work))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
