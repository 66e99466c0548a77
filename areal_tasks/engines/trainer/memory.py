"""When memory runs out: which settings to change."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch

from areal_tasks.launchers.advice import TRAINER_MEMORY
from schemas.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

#: Texts of torch's RuntimeErrors when the host has no more memory, or none that can be page-locked.
_HOST: Final = ("not enough memory", "can't allocate memory", "CUDA error: out of memory")


def names_memory_knobs(command: Callable[P, T]) -> Callable[P, T]:
    """`command`, raising a UserError that names settings to change if it runs out of GPU or host memory."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            found = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"the trainer ran out of memory: {found} In this order: {TRAINER_MEMORY}.") from error

    return guarded


def make_room() -> None:
    """Release the GPU memory that torch caches, for other processes on that GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _HOST)
