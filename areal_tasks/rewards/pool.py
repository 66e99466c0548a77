"""Verifies completions in processes that can be killed, so that a verifier's failure affects only its own sample."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Result, Row
from schemas.errors import UserError
from schemas.recipe.sections import Reward

#: Rows sent to a worker at once; fewer towards the end, so that no worker is left with all of the rest.
MAX_CHUNK: Final = 32

#: Losses of the forkserver without a verdict in between, after which the rows being verified are blamed.
MAX_LOSSES: Final = 2

#: The default wall-clock limit, as a multiple of the CPU limit: a busy machine may take so much longer.
WALL_FACTOR: Final = 60
_CHECK_SECONDS: Final = 0.05  # least time between two checks of a worker
_CLOSED: Final = "this pool of verifiers is closed"


class Job:
    """One call of `verify`: sends rows to idle workers, collects results, replaces workers that die or are too slow."""

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
        """Verifies the rows that have no result yet. ConnectionError if the forkserver is lost."""
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

    def forkserver_lost(self, error: ConnectionError, workers: list[Worker]) -> None:
        """Handle the loss of the forkserver. After `MAX_LOSSES` in a row, rows in progress fail at the next one.

        Raises:
            ConnectionError: `error`, if there were more than `MAX_LOSSES` in a row and no row is in progress.
        """
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
        """Sends the worker its rows. If it has ended, the first row fails, unless the forkserver was lost with it."""
        try:
            worker.send([self.rows[i] for i in worker.rows])
        except TimeoutError:
            self._fail(worker, "error", "the verifier's process hangs: it does not read the row")
        except OSError:
            self._await_status(worker)

    def _await_status(self, worker: Worker) -> None:
        """The worker has ended: wait for its exit status, or the loss of the forkserver, before the next check."""
        worker.ended, worker.check_at = True, time.monotonic() + self.server.reply_seconds

    def _begin(self, worker: Worker, cpu: float) -> None:
        worker.begin(cpu)
        self._schedule_check(worker, self.cpu_limit, self.wall_limit)

    def _collect(self) -> None:
        checks = [worker.check_at for worker in self.workers if worker.rows]
        pause = max(0.0, min(checks, default=0.0) - time.monotonic())
        for key, _ in self.selector.select(0.0 if self.server.exited else pause):
            if key.data in self.workers:
                self._receive(key.data)

    def _receive(self, worker: Worker) -> None:
        try:
            for result in worker.receive():
                if result.cpu - worker.cpu > self.cpu_limit:  # it arrived before a check
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
        """Replaces workers that ended by themselves; the row in progress of each gets `error`."""
        for pid, status in self.server.exits():
            for worker in [worker for worker in self.workers if worker.pid == pid]:
                self._receive(worker)
                if worker in self.workers:
                    self._fail(worker, "error", _describe_status(status))

    def _expire(self) -> None:
        for worker in [worker for worker in self.workers if worker.rows and worker.check_at <= time.monotonic()]:
            self._receive(worker)  # the result may have arrived just now
            if worker in self.workers and worker.rows and worker.check_at <= time.monotonic():
                self._check(worker)

    def _check(self, worker: Worker) -> None:
        """Fails the row in progress if it has exceeded a limit, or if the worker has ended without a report of it."""
        left_cpu = self.cpu_limit - worker.used()
        left_wall = worker.began + self.wall_limit - time.monotonic()
        if worker.ended:
            self._fail(worker, "error", "the verifier's process ended")
        elif left_cpu < 0:
            self._fail(worker, "timeout", self._too_much())
        elif left_wall < 0:
            self._fail(worker, "error", f"wall clock: not finished within {self.wall_limit:g} s (reward.wall_seconds)")
        else:
            self._schedule_check(worker, left_cpu, left_wall)

    def _schedule_check(self, worker: Worker, left_cpu: float, left_wall: float) -> None:
        """Rare while much time is left: a check reads all processes. Threads may use up the CPU seconds faster."""
        worker.check_at = time.monotonic() + max(_CHECK_SECONDS, min(left_cpu / 4, left_wall))

    def _too_much(self) -> str:
        return f"more than reward.timeout_seconds = {self.cpu_limit:g} s of CPU"

    def _fail(self, worker: Worker, verdict: str, detail: str) -> None:
        """The row in progress gets `verdict`; the rest of the worker's chunk goes to other workers."""
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
        """Stops listening to the worker. Returns whether it listened before."""
        listened = worker.channel in self.selector.get_map()
        if listened:
            self.selector.unregister(worker.channel)
        return listened


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"the verifier ended its process with status {status}"
    return f"the verifier's process was killed by signal {-status}"


@dataclass(frozen=True)
class VerifyResult:
    """A row of the `verify` table. The reward is NaN where the recipe states none for the verdict."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    verifier: str
    seconds: float


def unverified_verdicts(reward: Reward) -> frozenset[str]:
    """The verdicts without a judgement: `on_unverified` decides how these samples are treated."""
    return frozenset({"error"} if reward.timeout_reward is not None else {"timeout", "error"})


class VerifierPool:
    """`reward.workers` processes, kept running. `verify` may be called from any thread; calls take turns."""

    def __init__(self, settings: Reward) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # guards the next two fields; never held for long, unlike `_lock`
        self._closed = False
        self._loading: Forkserver | None = None
        self._server: Forkserver | None = None
        self._workers: list[Worker] = []
        self._job: Job | None = None

    @property
    def judged(self) -> int:
        """Number of verdicts of the current call of `verify`, or of the last one."""
        job = self._job
        return 0 if job is None else len(job.results)

    def __enter__(self) -> Self:
        """Loads the verifier. UserError if it cannot be loaded."""
        with self._lock:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of the pool for good, and waits for them. One that is loading the verifier is killed."""
        with self._gate:
            self._closed = True
            if self._loading is not None:
                self._loading.abandon()
        with self._lock:
            self._stop()

    def verify(self, rows: Sequence[Row]) -> list[VerifyResult]:
        """The rows' results, in order.

        A lost forkserver is replaced, and rows without a result are verified again.

        Raises:
            UserError: The verifier cannot be loaded.
            ConnectionError: The forkserver is lost repeatedly, although no verifier is running.
            RuntimeError: The pool is closed.
        """
        with self._lock:
            job = self._job = Job(rows, self.settings)
            try:
                while not job.done:
                    self._advance(job)
            except BaseException:
                self._stop()  # the workers still hold rows of this job
                raise
        return [self._result(result) for result in job.in_order()]

    def _advance(self, job: Job) -> None:
        try:
            job.run(self._start(), self._workers)
        except ConnectionError as error:
            job.forkserver_lost(error, self._workers)
            self._stop()

    def _start(self) -> Forkserver:
        if self._server is None:
            server = self._begin()
            try:
                self._load(server)
                self._workers = [server.fork() for _ in range(self.settings.workers)]
            except BaseException:
                server.close()
                raise
            self._server = server
        return self._server

    def _begin(self) -> Forkserver:
        """The forkserver before it loads the verifier; `close` can kill it from now on. RuntimeError if closed."""
        with self._gate:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._loading = Forkserver()
            return self._loading

    def _load(self, server: Forkserver) -> None:
        try:
            server.load(self.settings.verifier, self.settings.arguments, self.settings.memory_mb)
        except (UserError, ConnectionError) as error:
            if self._closed:  # `close` killed the process
                raise RuntimeError(_CLOSED) from error
            raise
        finally:
            with self._gate:
                self._loading = None

    def _stop(self) -> None:
        if self._server is not None:
            for worker in self._workers:
                worker.channel.close()
            self._workers.clear()
            self._server.close()
            self._server = None

    def _result(self, result: Result) -> VerifyResult:
        return VerifyResult(
            self._reward(result), result.verdict, result.parsed, result.detail, self.settings.verifier, result.seconds
        )

    def _reward(self, result: Result) -> float:
        if result.verdict == "unparseable":
            return self.settings.unparseable_reward
        if result.verdict == "timeout" and self.settings.timeout_reward is not None:
            return self.settings.timeout_reward
        if result.verdict in unverified_verdicts(self.settings):
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward
