"""The keeper: restarts the Prefect server and the worker of `arealflow up` when they die, until `down`.

A killed worker leaves its flow processes behind, which no process could cancel or observe. So the keeper ends them
with SIGTERM (they stop their services and report a crash), and the automation runs them again on the new worker. A flow
process survives a server that is down for some seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import httpx
import psutil

from flows.cli import machine
from flows.cli.machine import Machine
from flows.cli.upkeep import Upkeep, end_cancelling, flow_processes

log = logging.getLogger("keeper")

LOOK_SECONDS = 0.5
UPKEEP_SECONDS = 2.0
FLOW_GRACE_SECONDS = 10.0
#: After a process has lived this long, its next restart is immediate again.
STEADY_SECONDS = 10.0
LONGEST_DELAY_SECONDS = 30.0


@dataclass
class Backoff:
    """Seconds to wait before a restart: none at first, then 1, 2, 4, … while the process dies soon after its start."""

    failures: int = 0
    started: float = field(default_factory=time.monotonic)

    def delay(self) -> float:
        """The wait before the restart that is due now; call once per restart."""
        soon = time.monotonic() - self.started < STEADY_SECONDS
        self.failures = self.failures + 1 if soon else 0
        return min(LONGEST_DELAY_SECONDS, 2.0 ** (self.failures - 2)) if self.failures > 1 else 0.0

    def begin(self) -> None:
        """The process was started just now."""
        self.started = time.monotonic()


class Keeper:
    """Watches the processes in `up.json`. `stopped` ends it between two polls, never within one."""

    def __init__(self, watched: Machine, stopped: threading.Event) -> None:
        self.machine = watched
        self.stopped = stopped
        self.upkeep = Upkeep(watched.api_url)
        self.server, self.worker, self.trouble = Backoff(), Backoff(), Backoff()
        self.next_upkeep = 0.0
        self.written = True

    def __call__(self) -> None:
        """Watch until stopped; a failed poll, as on a full disk, is retried."""
        while not self.stopped.wait(LOOK_SECONDS):
            try:
                self.poll()
            except Exception:
                delay = self.trouble.delay()
                log.exception("this poll failed; the next one follows in %g s", delay)
                self.stopped.wait(delay)
                self.trouble.begin()

    def poll(self) -> None:
        """Restart what has died, the server first, since the worker needs it."""
        if not machine.alive(self.machine.server):
            self._restart_server()
        elif not machine.alive(self.machine.worker):
            self._restart_worker()
        elif not self.written:
            self._write(self.machine)
        elif time.monotonic() >= self.next_upkeep:
            self._look_after_flow_runs()

    def _restart_server(self) -> None:
        if self._may_start("server", self.server):
            self._write(replace(self.machine, server=machine.start_server(self.machine.api_url)))
            if machine.wait_for_api(self.machine.api_url, self._gives_up):
                log.info("the server answers again")

    def _restart_worker(self) -> None:
        try:
            end_cancelling(self.machine.api_url, "Its worker died while it was being cancelled.")
        except httpx.HTTPError as error:  # the upkeep cancels them later
            log.warning("cannot ask for cancelled flow runs: %s", error or type(error).__name__)
        left = ask_flows_to_end()
        if self._may_start("worker", self.worker):
            self._write(replace(self.machine, worker=machine.spawn_worker(self.machine.api_url)))
        kill(left, FLOW_GRACE_SECONDS)

    def _may_start(self, name: str, backoff: Backoff) -> bool:
        """Wait for the backoff's delay; False if the keeper was stopped meanwhile."""
        delay = backoff.delay()
        log.warning("the %s is gone; restarting it%s", name, f" in {delay:g} s" if delay else "")
        stop = self.stopped.wait(delay)
        backoff.begin()
        return not stop

    def _write(self, renewed: Machine) -> None:
        self.machine, self.written = renewed, False
        machine.write(renewed)
        self.written = True

    def _gives_up(self) -> bool:
        return self.stopped.is_set() or not machine.alive(self.machine.server)

    def _look_after_flow_runs(self) -> None:
        try:
            self.upkeep()
        except httpx.HTTPError as error:
            log.warning("the server did not answer: %s", error or type(error).__name__)
        self.next_upkeep = time.monotonic() + UPKEEP_SECONDS


def ask_flows_to_end() -> list[psutil.Process]:
    """Terminate the flow processes that a dead worker left; returns all processes of their flow runs."""
    left = _processes(flow_processes())
    ids = {process.pid for process in left}
    roots = [process for process in left if _parent(process) not in ids]  # a root stops its own descendants
    if roots:
        log.warning("ending the flow processes of the worker: %s", ", ".join(str(process.pid) for process in roots))
    for process in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    return left


def kill(processes: Sequence[psutil.Process], grace_seconds: float) -> None:
    """Kill the processes that have not ended after `grace_seconds`."""
    _, alive = psutil.wait_procs(processes, grace_seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    watched = machine.read()
    if watched is None:
        sys.exit("Nothing to watch: start the server and worker with `arealflow up`.")
    log.info("watching the server at %s and its worker", watched.api_url)
    Keeper(replace(watched, keeper=machine.started(os.getpid())), stopped)()


if __name__ == "__main__":
    main()
