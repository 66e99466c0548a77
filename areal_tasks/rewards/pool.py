"""Judges completions in processes that can be killed: whatever a verifier does costs its own sample, nothing else."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from areal_tasks.rewards.job import Job
from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Row
from areal_tasks.rewards.worker import Result
from schemas.recipe.sections import Reward


@dataclass(frozen=True)
class VerifyResult:
    """A row of the `verify` table. The reward is NaN where the recipe states none for the verdict."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    verifier: str
    seconds: float


def unverified(reward: Reward) -> frozenset[str]:
    """The verdicts that are no judgement: `on_unverified` decides what becomes of these samples."""
    return frozenset({"error"} if reward.timeout_reward is not None else {"timeout", "error"})


class VerifierPool:
    """`reward.workers` warm processes. `verify` may be called from any thread, by one at a time."""

    def __init__(self, settings: Reward) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._server: Forkserver | None = None
        self._workers: list[Worker] = []
        self._job: Job | None = None

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
        """The rows' results, in order.

        The process that starts the workers is replaced when it is lost, and what has no result is judged again.

        Raises:
            UserError: The verifier cannot be loaded.
            ConnectionError: That process is lost again and again, although no verifier is at work.
        """
        with self._lock:
            job = self._job = Job(rows, self.settings)
            try:
                while not job.done:
                    self._go_on(job)
            except BaseException:
                self._stop()  # the workers still hold rows of this job
                raise
        return [self._result(result) for result in job.in_order()]

    def _go_on(self, job: Job) -> None:
        try:
            job.run(self._start(), self._workers)
        except ConnectionError as error:
            job.interrupted(error, self._workers)
            self._stop()

    def _start(self) -> Forkserver:
        if self._server is None:
            server = Forkserver(self.settings.verifier, self.settings.arguments, self.settings.memory_mb)
            try:
                self._workers = [server.fork() for _ in range(self.settings.workers)]
            except BaseException:
                server.close()
                raise
            self._server = server
        return self._server

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
        if result.verdict in unverified(self.settings):
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward
