"""Runs benchmarks concurrently, each on its own physical cores, so that none slows another down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

Core = tuple[int, ...]  # its CPUs: more than one where it runs several threads


@dataclass(frozen=True)
class Job:
    """`python -m module arguments` on `cores` physical cores."""

    name: str
    module: str
    arguments: Sequence[str]
    cores: int


def physical_cores() -> list[Core]:
    """The cores that this process may use."""
    allowed = os.sched_getaffinity(0)
    return sorted({tuple(sorted(_siblings(cpu) & allowed)) for cpu in allowed})


def _siblings(cpu: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    if not path.is_file():
        return {cpu}
    ranges = [part.split("-") for part in path.read_text().strip().split(",")]
    return {cpu} | {n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)}


class Cores:
    """The physical cores that are free."""

    def __init__(self, cores: Sequence[Core]) -> None:
        self._free = list(cores)
        self._news = threading.Condition()

    @contextmanager
    def lent(self, count: int) -> Iterator[set[int]]:
        """The CPUs of so many cores, as soon as they are free."""
        with self._news:
            self._news.wait_for(lambda: len(self._free) >= count)
            mine, self._free = self._free[:count], self._free[count:]
        try:
            yield {cpu for core in mine for cpu in core}
        finally:
            with self._news:
                self._free = sorted([*self._free, *mine])
                self._news.notify_all()


def run_all(jobs: Sequence[Job], logs: Path, until: float) -> dict[str, str]:
    """Run the jobs, in their order as cores become free; what went wrong, by name. Each writes a log of its name.

    At `until`, of `time.monotonic`, those that run are ended, and those that have not begun do not begin.
    """
    cores = Cores(physical_cores())
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(jobs)) as threads:
        ends = list(threads.map(lambda job: _run(job, cores, logs / f"{job.name}.log", until), jobs))
    return {job.name: end for job, end in zip(jobs, ends, strict=True) if end}


def _run(job: Job, cores: Cores, log: Path, until: float) -> str:
    """Run a job. Returns an empty string, or what went wrong."""
    with cores.lent(job.cores) as cpus, log.open("wb") as out:
        if time.monotonic() >= until:
            return "no time was left"
        command = [sys.executable, "-m", job.module, *job.arguments]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        os.sched_setaffinity(process.pid, cpus)  # its services inherit it
        print(f"{job.name}: on CPUs {sorted(cpus)}", flush=True)
        try:
            code = process.wait(until - time.monotonic())
        except subprocess.TimeoutExpired:
            return "ended: no time was left"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}: {_last_line(log)}" if code else ""


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]
