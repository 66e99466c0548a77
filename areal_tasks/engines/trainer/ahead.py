"""Host work for the device: on one core, one item ahead, and for a GPU in a thread that launches no kernels."""

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
    """Inside this context torch uses one CPU thread: waking others takes several times as long as the work.

    The setting is process-wide; a thread that first uses torch inside the context keeps it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_core(device: torch.device, settings: Trainer) -> AbstractContextManager[None]:
    """Inside this context torch's host work uses one core if `device` is a GPU.

    That work is a few passes over the batch, and waking the other cores takes longer than all of them. A CPU that
    trains keeps its threads, since results depend bitwise on their number; so does an optimizer in host memory.
    torch.compile recompiles for another number of threads: enter this before every pass, or before none.
    """
    return one_thread() if device.type == "cuda" and not settings.cpu_offload else nullcontext()


def background_thread(device: torch.device) -> AbstractContextManager[Executor | None]:
    """A thread next to the one that launches the work of `device`, ended with the context; None if that is a CPU.

    A CPU computes at once what is launched: another thread would only take cores from it.
    """
    return _thread(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _thread(device: torch.device) -> Iterator[Executor]:
    with ThreadPoolExecutor(1, "ahead", _initialise, (device,)) as thread:
        thread.submit(torch.get_num_threads).result()  # `_initialise` has run
        torch.set_num_threads(torch.get_num_threads())  # new threads inherit the last setting: restore this one's
        yield thread


def _initialise(device: torch.device) -> None:
    """Select the device, for pinning memory, and one core: torch would start a pool of threads for this thread."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Ahead(Iterator[T], Generic[T]):
    """The items of `source`. With a `thread` each is made while the previous one is used, otherwise on request.

    An exception raised while making an item is raised when the item is taken.
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
        """Make the next item, now or in the thread, unless it is already made."""
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
