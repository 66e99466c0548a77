"""How much memory there is, and, when it runs out, which knobs to turn."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor

from schemas.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

REMEDIES: Final = (
    "lower trainer.micro_batch_tokens, then trainer.head_chunk_tokens; set trainer.gradient_checkpointing; set "
    "trainer.cpu_offload (fsdp2, deepspeed); share the model between more trainer.ranks; where a server is on the same "
    "GPU, lower inference.memory_fraction or set inference.release_memory"
)
#: What torch says when the host has no more memory, in a plain RuntimeError; the last of memory to be page-locked.
_HOST: Final = ("not enough memory", "can't allocate memory", "CUDA error: out of memory")
CGROUPS: Final = Path("/sys/fs/cgroup")


def names_memory_knobs(command: Callable[P, T]) -> Callable[P, T]:
    """`command`, raising a UserError that names what to change where it runs out of memory, of a GPU or of the host."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            found = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"the trainer ran out of memory: {found} In this order: {REMEDIES}.") from error

    return guarded


def make_room() -> None:
    """Give what torch keeps of the GPU's memory for later back to the other processes on it."""
    gc.collect()
    torch.cuda.empty_cache()


def host_room(own: Path = Path("/proc/self/cgroup"), groups: Path = CGROUPS) -> int:
    """Bytes of host memory that may still be taken: of the machine, or of the container or job if that has less.

    Only version 2 of cgroups is asked (docs.kernel.org/admin-guide/cgroup-v2.html, memory).
    """
    return min([psutil.virtual_memory().available, *_left_in_groups(own, groups)])


def _left_in_groups(own: Path, groups: Path) -> Iterator[int]:
    lines = own.read_text().splitlines() if own.exists() else []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (groups / name, *(groups / name).parents):
        most, taken, stat = (folder / f"memory.{what}" for what in ("max", "current", "stat"))
        if all(file.exists() for file in (most, taken, stat)) and (limit := most.read_text().strip()) != "max":
            yield int(limit) - int(taken.read_text()) + _cached(stat)


def _cached(stat: Path) -> int:
    """Bytes of files that the kernel keeps in memory for a group, and gives up for whoever asks for memory."""
    found = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    return int(found.get("active_file", 0)) + int(found.get("inactive_file", 0))


def copy_bytes(tensors: Iterable[Tensor]) -> int:
    """Host memory that copies of these take: of what is on a GPU page-locked, in blocks of powers of two."""
    return sum(1 << (t.nbytes - 1).bit_length() if t.is_cuda and t.nbytes else t.nbytes for t in tensors)


def ran_out(error: Exception) -> bool:
    """Whether `error` says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _HOST)
