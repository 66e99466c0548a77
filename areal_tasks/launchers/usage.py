"""A service's use of its machine: CPU and memory of its processes, and its GPUs. Measured from outside, so that it
does not depend on the kind of service, or whether it answers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
from pydantic import Field

from areal_tasks.launchers.gpus import gpu_usage
from areal_tasks.processes import family
from schemas.record import Record


class Usage(Record):
    """A measurement. None: unknown, such as the CPU time of a service that is a thread."""

    host: str
    cores: int = Field(description="of the machine")
    at: float = Field(description="seconds of a clock of the machine; only differences are meaningful")
    cpu_seconds: float | None = Field(None, description="since they started, of the processes that run")
    memory: int | None = Field(None, description="resident bytes; pages that processes share count for each")
    gpu: float | None = Field(None, description="share of the time in which its GPUs computed: their mean")
    gpu_memory: int | None = Field(None, description="bytes in use on its GPUs, by all processes")


def machine() -> Usage:
    """This machine, without any process."""
    return Usage(host=socket.gethostname(), cores=os.cpu_count() or 1, at=time.monotonic())


def measure(pid: int, gpus: Sequence[str] = (), descendants: bool = True) -> Usage:
    """The usage of a process, alone or with its `descendants`, and of its GPUs."""
    processes = family(pid) if descendants else [psutil.Process(pid)]
    taken = [found for process in processes if (found := _taken(process)) is not None]
    gpu, gpu_memory = gpu_usage(gpus) or (None, None)
    counted = {"cpu_seconds": sum(one[0] for one in taken), "memory": sum(one[1] for one in taken)} if taken else {}
    return machine().model_copy(update={**counted, "gpu": gpu, "gpu_memory": gpu_memory})


def _taken(process: psutil.Process) -> tuple[float, int] | None:
    """CPU seconds and resident bytes; None if it has ended."""
    with suppress(psutil.Error), process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss
    return None
