"""Judges completions in processes that can be killed: whatever a verifier does costs its own sample, nothing else."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from areal_tasks.rewards.job import Job
from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Row
from areal_tasks.rewards.worker import Result
from schemas.errors import UserError
from schemas.recipe.sections import Reward

_CLOSED: Final = "this pool of verifiers is closed"


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
        self._gate = threading.Lock()  # of the next two; held for moments only, unlike the other
        self._closed = False
        self._loading: Forkserver | None = None
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
        """Ends all processes of the pool, for good, and waits for that. One that is loading the verifier is killed."""
        with self._gate:
            self._closed = True
            if self._loading is not None:
                self._loading.abandon()
        with self._lock:
            self._stop()

    def verify(self, rows: Sequence[Row]) -> list[VerifyResult]:
        """The rows' results, in order.

        The process that starts the workers is replaced when it is lost, and what has no result is judged again.

        Raises:
            UserError: The verifier cannot be loaded.
            ConnectionError: That process is lost again and again, although no verifier is at work.
            RuntimeError: The pool is closed.
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
        """The process, which has yet to load the verifier; `close` knows of it, or has been called before."""
        with self._gate:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._loading = Forkserver()
            return self._loading

    def _load(self, server: Forkserver) -> None:
        try:
            server.load(self.settings.verifier, self.settings.arguments, self.settings.memory_mb)
        except (UserError, ConnectionError) as error:
            if self._closed:  # so it was abandoned
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
        if result.verdict in unverified(self.settings):
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward
