"""One call of the pool's `verify`: which worker has which row, for how long, and what becomes of it."""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Row
from areal_tasks.rewards.worker import Result
from schemas.recipe.sections import Reward

#: Rows sent to a worker at once; fewer towards the end, so that no worker is left with all of the rest.
MAX_CHUNK: Final = 32

#: Losses of the process that starts the workers, without a verdict in between, after which those at work are blamed.
MAX_LOSSES: Final = 2

#: The wall clock's limit, unless the recipe states one: a busy machine may take so many times the CPU seconds.
WALL_FACTOR: Final = 60
_LOOK_SECONDS: Final = 0.05


class Job:
    """One call of `verify`: hands rows to idle workers, collects results, replaces workers that die or are too slow."""

    server: Forkserver
    workers: list[Worker]

    def __init__(self, rows: Sequence[Row], settings: Reward) -> None:
        self.rows = rows
        self.cpu_limit = settings.timeout_seconds
        self.wall_limit = settings.wall_seconds or WALL_FACTOR * settings.timeout_seconds
        self.results: dict[int, Result] = {}
        self.losses, self.known = 0, 0  # losses of the forkserver in a row, and results at the last one

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.rows)

    def in_order(self) -> list[Result]:
        return [self.results[i] for i in range(len(self.rows))]

    def run(self, server: Forkserver, workers: list[Worker]) -> None:
        """Judges what has no result yet. ConnectionError when the forkserver is lost."""
        self.server, self.workers = server, workers
        self.waiting = deque(i for i in range(len(self.rows)) if i not in self.results)
        with selectors.DefaultSelector() as self.selector:
            self.selector.register(server.control, selectors.EVENT_READ)
            for worker in workers:
                self.selector.register(worker.channel, selectors.EVENT_READ, worker)
            while not self.done:
                self._replace_exited()
                self._hand_out()
                self._collect()
                self._expire()

    def interrupted(self, error: ConnectionError, workers: list[Worker]) -> None:
        """The forkserver was lost. The rows at work are to blame when that happens again and again: raises without."""
        self.losses = 1 if len(self.results) > self.known else self.losses + 1
        if self.losses > MAX_LOSSES:
            blamed = [worker for worker in workers if worker.rows]
            if not blamed:
                raise error
            for worker in blamed:
                self._answer(worker, "error", str(error))
            self.losses = 0
        self.known = len(self.results)

    def _hand_out(self) -> None:
        for worker in list(self.workers):
            if self.waiting and not worker.rows:
                size = min(MAX_CHUNK, math.ceil(len(self.waiting) / (2 * len(self.workers))))
                worker.rows.extend(self.waiting.popleft() for _ in range(size))
                self._begin(worker, worker.cpu)
                self._send(worker)

    def _send(self, worker: Worker) -> None:
        """Hands over its rows. One that has ended costs the first of them, unless the forkserver was lost with it."""
        try:
            worker.send([self.rows[i] for i in worker.rows])
        except TimeoutError:
            self._fail(worker, "error", "the verifier's process hangs: it does not take the row")
        except OSError:
            self._await_status(worker)

    def _await_status(self, worker: Worker) -> None:
        """It has ended: its exit status comes, or the loss of the forkserver, before anybody looks at it again."""
        worker.ended, worker.look_at = True, time.monotonic() + self.server.reply_seconds

    def _begin(self, worker: Worker, cpu: float) -> None:
        worker.begin(cpu)
        self._look_again(worker, self.cpu_limit, self.wall_limit)

    def _collect(self) -> None:
        looks = [worker.look_at for worker in self.workers if worker.rows]
        pause = max(0.0, min(looks, default=0.0) - time.monotonic())
        for key, _ in self.selector.select(0.0 if self.server.exited else pause):
            if key.data in self.workers:
                self._receive(key.data)

    def _receive(self, worker: Worker) -> None:
        try:
            for result in worker.receive():
                if result.cpu - worker.cpu > self.cpu_limit:  # it came before anybody looked
                    self._answer(worker, "timeout", self._too_much())
                else:
                    self.results[worker.rows.popleft()] = result
                self._begin(worker, result.cpu)
                if result.last:
                    self._replace(worker)
                    return
        except ValueError as error:
            self._fail(worker, "error", str(error))
            return
        if worker.ended and self._forget(worker):
            self._await_status(worker)

    def _replace_exited(self) -> None:
        """Replaces workers that ended by themselves; the row each was at gets an `error`."""
        for pid, status in self.server.exits():
            for worker in [worker for worker in self.workers if worker.pid == pid]:
                self._receive(worker)
                if worker in self.workers:
                    self._fail(worker, "error", _describe(status))

    def _expire(self) -> None:
        for worker in [worker for worker in self.workers if worker.rows and worker.look_at <= time.monotonic()]:
            self._receive(worker)  # the result may have arrived just now
            if worker in self.workers and worker.rows and worker.look_at <= time.monotonic():
                self._look(worker)

    def _look(self, worker: Worker) -> None:
        """Ends the row the worker is at if it has exceeded a limit, or has ended and nobody reports that."""
        left_cpu = self.cpu_limit - worker.used()
        left_wall = worker.began + self.wall_limit - time.monotonic()
        if worker.ended:
            self._fail(worker, "error", "the verifier's process ended")
        elif left_cpu < 0:
            self._fail(worker, "timeout", self._too_much())
        elif left_wall < 0:
            self._fail(worker, "error", f"wall clock: not finished within {self.wall_limit:g} s (reward.wall_seconds)")
        else:
            self._look_again(worker, left_cpu, left_wall)

    def _look_again(self, worker: Worker, left_cpu: float, left_wall: float) -> None:
        """Later, the more it has left: looking reads all processes. A few threads may use up the CPU seconds faster."""
        worker.look_at = time.monotonic() + max(_LOOK_SECONDS, min(left_cpu / 4, left_wall))

    def _too_much(self) -> str:
        return f"more than reward.timeout_seconds = {self.cpu_limit:g} s of CPU"

    def _fail(self, worker: Worker, verdict: str, detail: str) -> None:
        """The row the worker is at gets `verdict`; the rest of its chunk goes to others."""
        if worker.rows:
            self._answer(worker, verdict, detail)
        self._replace(worker)

    def _answer(self, worker: Worker, verdict: str, detail: str) -> None:
        seconds = time.monotonic() - worker.began
        self.results[worker.rows.popleft()] = Result(0.0, verdict, "", detail, seconds, worker.cpu, True)

    def _replace(self, worker: Worker) -> None:
        self.waiting.extendleft(reversed(worker.rows))
        self._forget(worker)
        self.server.kill(worker)
        fresh = self.server.fork()
        self.workers[self.workers.index(worker)] = fresh
        self.selector.register(fresh.channel, selectors.EVENT_READ, fresh)

    def _forget(self, worker: Worker) -> bool:
        """Listens to it no longer; whether it did."""
        listened = worker.channel in self.selector.get_map()
        if listened:
            self.selector.unregister(worker.channel)
        return listened


def _describe(status: int) -> str:
    if status >= 0:
        return f"the verifier ended its process with status {status}"
    return f"the verifier's process was killed by signal {-status}"
