"""The memory that a step takes, and the settings to change when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def watch_peak(device: torch.device) -> None:
    """Begin to measure `peak_bytes`, where that is possible: on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory of tensors on the GPU since `watch_peak`; on the CPU, of this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024  # not getrusage: a process inherits that peak from the one that started it
