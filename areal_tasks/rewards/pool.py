"""Judges completions in processes that can be killed: whatever a verifier does costs its own sample, nothing else."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import UNVERIFIED
from areal_tasks.rewards.worker import Result
from schemas.recipe.sections import Reward

Row = tuple[str, str, str]  # prompt, completion, answer

#: Rows sent to a worker at once; fewer towards the end, so that no worker is left with all of the rest.
MAX_CHUNK: Final = 32


@dataclass(frozen=True)
class VerifyResult:
    """A row of the `verify` table. A `timeout` or `error` has reward NaN, unless the recipe states one."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    verifier: str
    seconds: float


class VerifierPool:
    """`reward.workers` warm processes. `verify` may be called from any thread, by one at a time."""

    def __init__(self, settings: Reward) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._server: Forkserver | None = None
        self._workers: list[Worker] = []
        self._job: _Job | None = None

    @property
    def judged(self) -> int:
        """Verdicts that the call of `verify` under way has; of the last one after it."""
        job = self._job
        return 0 if job is None else len(job.results)

    def __enter__(self) -> Self:
        """Loads the verifier. UserError when it cannot be loaded."""
        with self._lock:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of the pool and waits for that. A later `verify` starts afresh."""
        with self._lock:
            self._stop()

    def verify(self, rows: Sequence[Row]) -> list[VerifyResult]:
        """The rows' results, in order. UserError when the verifier cannot be loaded."""
        with self._lock:
            self._start()
            try:
                self._job = _Job(self._server_running(), self._workers, self.settings.timeout_seconds, rows)
                results = self._job.run()
            except BaseException:
                self._stop()  # the workers still hold rows of this job
                raise
        return [self._result(result) for result in results]

    def _start(self) -> None:
        if self._server is None:
            server = Forkserver(self.settings.verifier, self.settings.arguments, self.settings.memory_mb)
            try:
                self._workers = [server.fork() for _ in range(self.settings.workers)]
            except BaseException:
                server.close()
                raise
            self._server = server

    def _stop(self) -> None:
        if self._server is not None:
            for worker in self._workers:
                worker.channel.close()
            self._workers.clear()
            self._server.close()
            self._server = None

    def _server_running(self) -> Forkserver:
        assert self._server is not None
        return self._server

    def _result(self, result: Result) -> VerifyResult:
        return VerifyResult(
            self._reward(result), result.verdict, result.parsed, result.detail, self.settings.verifier, result.seconds
        )

    def _reward(self, result: Result) -> float:
        if result.verdict == "unparseable":
            return self.settings.unparseable_reward
        if result.verdict in UNVERIFIED:
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward


class _Job:
    """One call of `verify`: hands rows to idle workers, collects results, replaces workers that die or are too slow."""

    def __init__(self, server: Forkserver, workers: list[Worker], timeout: float, rows: Sequence[Row]) -> None:
        self.server, self.workers, self.timeout, self.rows = server, workers, timeout, rows
        self.waiting = deque(range(len(rows)))
        self.results: dict[int, Result] = {}

    def run(self) -> list[Result]:
        with selectors.DefaultSelector() as self.selector:
            self.selector.register(self.server.control, selectors.EVENT_READ)
            for worker in self.workers:
                self.selector.register(worker.channel, selectors.EVENT_READ, worker)
            while len(self.results) < len(self.rows):
                self._bury()
                self._hand_out()
                self._collect()
                self._expire()
        return [self.results[i] for i in range(len(self.rows))]

    def _hand_out(self) -> None:
        for worker in list(self.workers):
            if self.waiting and not worker.rows:
                size = min(MAX_CHUNK, math.ceil(len(self.waiting) / (2 * len(self.workers))))
                worker.rows.extend(self.waiting.popleft() for _ in range(size))
                worker.deadline = time.monotonic() + self.timeout
                if not worker.send([self.rows[i] for i in worker.rows], self.timeout):
                    self._fail(worker, "error", "the verifier's process ended, or hangs, before it was given the row")

    def _collect(self) -> None:
        deadlines = [worker.deadline for worker in self.workers if worker.rows]
        pause = max(0.0, min(deadlines, default=0.0) - time.monotonic())
        for key, _ in self.selector.select(0.0 if self.server.exited else pause):
            if key.data in self.workers:
                self._receive(key.data)

    def _receive(self, worker: Worker) -> None:
        try:
            for result in worker.receive():
                self.results[worker.rows.popleft()] = result
                worker.deadline = time.monotonic() + self.timeout
                if result.last:
                    self._replace(worker)
                    return
        except ValueError as error:
            self._fail(worker, "error", str(error))
            return
        if worker.ended:
            self._forget(worker)  # its exit status follows

    def _bury(self) -> None:
        """Replaces workers that ended by themselves; the row each was at gets an `error`."""
        for pid, status in self.server.exits():
            for worker in [worker for worker in self.workers if worker.pid == pid]:
                self._receive(worker)
                if worker in self.workers:
                    self._fail(worker, "error", _describe(status))

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self.workers if worker.rows and worker.deadline <= now]:
            self._receive(worker)  # the result may have arrived just now
            if worker in self.workers and worker.rows and worker.deadline <= now:
                self._fail(worker, "timeout", f"not finished within reward.timeout_seconds = {self.timeout:g}")

    def _fail(self, worker: Worker, verdict: str, detail: str) -> None:
        """The row the worker is at gets `verdict`; the rest of its chunk goes to others."""
        if worker.rows:
            seconds = time.monotonic() - worker.deadline + self.timeout
            self.results[worker.rows.popleft()] = Result(0.0, verdict, "", detail, seconds, True)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self.waiting.extendleft(reversed(worker.rows))
        self._forget(worker)
        self.server.kill(worker)
        fresh = self.server.fork()
        self.workers[self.workers.index(worker)] = fresh
        self.selector.register(fresh.channel, selectors.EVENT_READ, fresh)

    def _forget(self, worker: Worker) -> None:
        if worker.channel in self.selector.get_map():
            self.selector.unregister(worker.channel)


def _describe(status: int) -> str:
    if status >= 0:
        return f"the verifier ended its process with status {status}"
    return f"the verifier's process was killed by signal {-status}"
