"""Verifies completions in processes that can be killed, so that a verifier's failure affects only its own sample."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from areal_tasks.code_digests import VERIFIER
from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Result, Row
from schemas.errors import UserError
from schemas.recipe.sections import Reward

#: Rows sent to a worker at once; fewer towards the end, so that no worker is left with all of the rest.
MAX_CHUNK: Final = 32

#: Losses of the forkserver while a row was in progress or next, after which the row is blamed.
MAX_LOSSES: Final = 2

#: The default wall-clock limit, as a multiple of the CPU limit: a busy machine may take so much longer.
WALL_FACTOR: Final = 60
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


def unverified_verdicts(reward: Reward) -> frozenset[str]:
    """The verdicts without a judgement: `on_unverified` decides how these samples are treated."""
    return frozenset({"error"} if reward.timeout_reward is not None else {"timeout", "error"})


class Call(Future[list[VerifyResult]]):
    """Rows to be verified; the future's result has one for each, in order. Without rows, it waits for a worker alone.

    `waiting`: the rows that no worker has been given. `losses`: of the forkserver, while a row was the next.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = rows
        self.waiting = deque(range(len(rows)))
        self.results: dict[int, VerifyResult] = {}
        self.losses = Counter[int]()


class VerifierPool:
    """`reward.workers` processes, kept running, each with a thread that gives it rows. For any thread.

    `code`: digests of users' code, that of the verifier included; {}: any is taken.
    """

    def __init__(self, settings: Reward, code: Mapping[str, str] = MappingProxyType({})) -> None:
        self.settings = settings
        self._code = code.get(VERIFIER, "")
        self._wall_limit = settings.wall_seconds or WALL_FACTOR * settings.timeout_seconds
        self._threads: list[threading.Thread] = []
        self._calls: list[Call] = []
        self._server: Forkserver | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards the fields above; never held for long

    @property
    def judged(self) -> int:
        """Number of verdicts of the calls in progress, or of the last one."""
        return sum(len(call.results) for call in self._calls)

    def __enter__(self) -> Self:
        """Loads the verifier. UserError if it cannot be loaded."""
        self.verify(())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of the pool for good, and waits for them. Calls in progress fail."""
        with self._changed:
            self._closed = True
            for call in self._calls:
                self._fail(call, RuntimeError(_CLOSED))
            self._changed.notify_all()
        if self._server is not None:
            self._server.close()
        for thread in self._threads:
            thread.join()

    def verify(self, rows: Sequence[Row]) -> list[VerifyResult]:
        """The rows' results, in order. Errors as of `submit`."""
        return self.submit(rows).result()

    def submit(self, rows: Sequence[Row]) -> Call:
        """Begins to verify rows, after those of earlier calls. A lost forkserver is replaced, and its rows begin again.

        RuntimeError if the pool is closed. The call raises the same if that happens before its end; UserError if the
        verifier cannot be loaded; ConnectionError if the forkserver is lost repeatedly, although no verifier runs.
        """
        call = Call(rows)
        with self._changed:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._calls = [*(one for one in self._calls if not one.done()), call]
            while len(self._threads) < self.settings.workers:
                thread = threading.Thread(target=self._work, name="verifiers", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        return call

    def _work(self) -> None:
        """Has one process after the other verify rows, until the pool is closed."""
        worker: Worker | None = None
        while (taken := self._take()) is not None:
            call, rows = taken
            try:
                worker = self._advance(call, rows, worker)
            except BaseException as error:
                worker = None
                with self._changed:
                    self._fail(call, error)
        if worker is not None:
            worker.close()

    def _take(self) -> tuple[Call, deque[int]] | None:
        """The next rows for a worker, once there are some; None once the pool is closed."""
        with self._changed:
            while not self._closed:
                open_calls = [call for call in self._calls if not call.done()]
                if (call := next((call for call in open_calls if call.waiting or not call.rows), None)) is not None:
                    share = math.ceil(sum(len(one.waiting) for one in open_calls) / (2 * self.settings.workers))
                    size = min(MAX_CHUNK, share, len(call.waiting))
                    return call, deque(call.waiting.popleft() for _ in range(size))
                self._changed.wait()
            return None

    def _advance(self, call: Call, rows: deque[int], worker: Worker | None) -> Worker | None:
        """Has a worker verify rows; those without a result wait again. Returns the worker, if it can go on."""
        server, begun = self._running(), False
        try:
            if worker is None or worker.server is not server or not worker.idles():
                if worker is not None:
                    worker.close()
                worker = Worker(server)
            begun = True
            for result in worker.verify([call.rows[i] for i in rows], self.settings.timeout_seconds, self._wall_limit):
                self._answer(call, result, rows.popleft())
                if result.last:
                    worker.close()
                    return None
            self._answer(call)
            return worker
        except BaseException as error:
            if worker is not None:
                worker.close()
            if isinstance(error, (ConnectionError, UserError)):
                self._end(server)
            row = rows[0] if rows else -1
            call.losses[row] += 1
            too_often = call.losses[row] > MAX_LOSSES
            if not isinstance(error, ConnectionError) or (too_often and not begun):
                raise
            if too_often:
                self._answer(call, Result(0.0, "error", "", str(error), 0.0, 0.0, True), rows.popleft())
            return None
        finally:
            with self._changed:
                call.waiting.extendleft(reversed(rows))
                self._changed.notify_all()

    def _running(self) -> Forkserver:
        """The forkserver. It is started if there is none. RuntimeError if the pool is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError(_CLOSED)
            if self._server is None:
                given = self.settings.verifier, self.settings.arguments, self.settings.memory_mb
                self._server = Forkserver(*given, self._code)
            return self._server

    def _end(self, server: Forkserver) -> None:
        """Ends a forkserver, and its workers with it. Another is started when it is needed."""
        with self._changed:
            self._server = None if self._server is server else self._server
        server.close()

    def _answer(self, call: Call, result: Result | None = None, row: int = -1) -> None:
        """Adds the result of a row. The last one ends the call."""
        with self._changed:
            if result is not None:
                found = self._reward(result), result.verdict, result.parsed, result.detail
                call.results[row] = VerifyResult(*found, self.settings.verifier, result.seconds)
            if len(call.results) == len(call.rows) and not call.done() and call.set_running_or_notify_cancel():
                call.set_result([call.results[i] for i in range(len(call.rows))])

    def _fail(self, call: Call, error: BaseException) -> None:
        if not call.done() and call.set_running_or_notify_cancel():
            call.set_exception(error)

    def _reward(self, result: Result) -> float:
        if result.verdict == "unparseable":
            return self.settings.unparseable_reward
        if result.verdict == "timeout" and self.settings.timeout_reward is not None:
            return self.settings.timeout_reward
        if result.verdict in unverified_verdicts(self.settings):
            return self.settings.unverified_reward if self.settings.on_unverified == "reward" else math.nan
        return result.reward
