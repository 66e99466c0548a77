"""What the host does for the device: on one core, and an item ahead, beside a GPU in a thread that launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Generic, TypeVar

import torch

from schemas.recipe.sections import Trainer

T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """While inside, torch does its work here: to wake other threads takes several times as long as the work.

    The number holds for the whole process; a thread that first uses torch meanwhile keeps it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_core(device: torch.device, settings: Trainer) -> AbstractContextManager[None]:
    """While inside, torch's work in host memory takes one core where `device` is a GPU.

    There it is a few passes over the batch, and to wake the other cores takes longer than all of them. A CPU that
    computes keeps its threads, on whose number its bits hang, and so does an optimizer in host memory. What has been
    compiled is compiled again for another number of threads: enter this before every pass, or before none.
    """
    return one_thread() if device.type == "cuda" and not settings.cpu_offload else nullcontext()


def aside(device: torch.device) -> AbstractContextManager[Executor | None]:
    """A thread beside the one that launches the work of `device`, gone with the context; None where that is a CPU.

    A CPU computes what is launched at once: a thread would only take cores from it.
    """
    return _thread(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _thread(device: torch.device) -> Iterator[Executor]:
    with ThreadPoolExecutor(1, "ahead", _settle, (device,)) as thread:
        thread.submit(torch.get_num_threads).result()  # it has settled
        torch.set_num_threads(torch.get_num_threads())  # what one thread sets, later ones begin with
        yield thread


def _settle(device: torch.device) -> None:
    """Take the device, for the memory that is pinned, and one core: torch would start a pool of threads for this."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Ahead(Iterator[T], Generic[T]):
    """The items of `source`. In a `thread` each is made while the one before is used, else when it is asked for.

    What making an item raises, taking it raises.
    """

    def __init__(self, source: Iterator[T], thread: Executor | None) -> None:
        self.source = source
        self.thread = thread
        self.coming: Future[list[T]] | None = None

    def __next__(self) -> T:
        found = self._prepared()
        self.coming = None
        if self.thread is not None:
            self.prepare()
        for item in found.result():
            return item
        raise StopIteration

    def prepare(self) -> None:
        """Have the next item made, in the thread or now, unless it is."""
        self._prepared()

    def _prepared(self) -> Future[list[T]]:
        if self.coming is None:
            self.coming = _now(self.source) if self.thread is None else self.thread.submit(_next, self.source)
        return self.coming


def _now(source: Iterator[T]) -> Future[list[T]]:
    done: Future[list[T]] = Future()
    done.set_result(_next(source))
    return done


def _next(source: Iterator[T]) -> list[T]:
    """The next item, if there is one."""
    return list(islice(source, 1))
