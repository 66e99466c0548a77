"""Verifies completions in processes that can be killed, so that a verifier's failure affects only its own sample."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        if result.verdict in unverified(self.settings):
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward
