"""Restarts a run in the same process while its store or an engine is unavailable.

A restart has new services and a new owner, and reuses what is committed. A store that is unreachable at the flow run's
first request is more likely a mistake, and reported immediately. A start whose iteration an earlier start has committed
(`HeadMoved`) is restarted in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from prefect import get_run_logger
from prefect.runtime import flow_run

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.store.backend import Unavailable
from areal_tasks.store.runs import HeadMoved

T = TypeVar("T")

RESTARTED_AFTER: Final = (Unavailable, TrainerDown, ServerDown, HeadMoved)
#: How long a flow retries without committing an iteration.
WAIT_SECONDS: Final = 600.0
LONGEST_PAUSE_SECONDS: Final = 15.0


class RestartBudget:
    """Counts failures since the last progress. `known`: the store has answered before, so that retries make sense."""

    def __init__(self, known: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.known = known
        self.clock = clock
        self.failures = 0
        self.until = 0.0  # after the first failure: when retries end

    def progressed(self) -> None:
        """Record progress: the store answered and the run was opened, or an iteration was committed."""
        self.known, self.failures = True, 0

    def pause(self, error: Exception) -> float:
        """Seconds until the next retry: 1, 2, 4, … Raises `error` when retries are over or make no sense."""
        self.until = self.until if self.failures else self.clock() + WAIT_SECONDS
        if not self.known or self.clock() > self.until:
            raise error
        self.failures += 1
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.failures - 1))


def with_restarts(work: Callable[[RestartBudget], T]) -> T:
    """Call `work`, retrying while it raises an error of RESTARTED_AFTER; returns its result, raises other errors."""
    budget = RestartBudget(known=flow_run.get_run_count() > 1)
    while True:
        try:
            return work(budget)
        except RESTARTED_AFTER as error:
            seconds = budget.pause(error)
            again = "%s Trying again in %g s, for at most %g s without a commit."
            get_run_logger().warning(again, error, seconds, WAIT_SECONDS)
            time.sleep(seconds)
