"""How many threads torch takes for what it does in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
