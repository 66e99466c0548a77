"""The memory that a step takes, and that is free, and the settings to change when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import torch

from areal_tasks.launchers.advice import TRAINER_MEMORY
from schemas.errors import UserError, first_line

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
        what = f"the trainer ran out of memory: {first_line(error)}"
        raise UserError(f"{what} In this order: {TRAINER_MEMORY}.") from error


def ran_out(error: BaseException) -> bool:
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


def host_room(own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that are free: of the machine, or of this process's container or job if that has fewer.

    Only version 2 of cgroups is asked (docs.kernel.org/admin-guide/cgroup-v2.html, memory).
    """
    return min([psutil.virtual_memory().available, *_left_in_groups(own, groups)])


def _left_in_groups(own: Path, groups: Path) -> Iterator[int]:
    lines = own.read_text().splitlines() if own.exists() else []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (groups / name, *(groups / name).parents):
        most, taken, stat = (folder / f"memory.{what}" for what in ("max", "current", "stat"))
        if all(file.exists() for file in (most, taken, stat)) and (limit := most.read_text().strip()) != "max":
            found = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
            files = int(found.get("active_file", 0)) + int(found.get("inactive_file", 0))  # given up when asked for
            yield int(limit) - int(taken.read_text()) + files
