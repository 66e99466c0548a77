"""When memory runs out: which settings to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from areal_tasks.launchers.advice import TRAINER_MEMORY
from schemas.errors import UserError

#: Texts of torch's RuntimeErrors when the host has no more memory, or none that can be page-locked.
_HOST: Final = ("not enough memory", "can't allocate memory", "CUDA error: out of memory")


@contextmanager
def names_memory_knobs() -> Iterator[None]:
    """If GPU or host memory runs out inside, raise a UserError that names settings to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the trainer ran out of memory: {found} In this order: {TRAINER_MEMORY}.") from error


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _HOST)
