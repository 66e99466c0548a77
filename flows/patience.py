"""A flow waits for a store or an engine that is away for a while, and then goes on where the run stands.

Waiting is a new start within the same process: new services, a new owner, what is committed is reused. A store that
cannot be reached when a flow run first asks for it is more likely a mistake: that is reported at once. A start that
lost an iteration to the last commit of the start before it begins anew in the same way.
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
from areal_tasks.store.runs import Behind

T = TypeVar("T")

AWAY: Final = (Unavailable, TrainerDown, ServerDown, Behind)
#: How long a flow goes on trying without committing an iteration.
WAIT_SECONDS: Final = 600.0
LONGEST_PAUSE_SECONDS: Final = 15.0


class Patience:
    """Counts what fails without anything being committed between. `known`: it is certain that there is something."""

    def __init__(self, known: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.known = known
        self.clock = clock
        self.failures = 0
        self.since = 0.0

    def progressed(self) -> None:
        """What was needed is there, and something has come of it."""
        self.known, self.failures = True, 0

    def pause(self, error: Exception) -> float:
        """Seconds until the next try: 1, 2, 4, … Raises `error` when it is time to give up."""
        if not self.known:
            raise error
        self.since = self.since if self.failures else self.clock()
        if self.clock() - self.since > WAIT_SECONDS:
            raise error
        self.failures += 1
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.failures - 1))


def patiently(work: Callable[[Patience], T]) -> T:
    """What `work` returns, tried again while something it needs is away. Raises what it raises otherwise."""
    patience = Patience(known=flow_run.get_run_count() > 1)
    while True:
        try:
            return work(patience)
        except AWAY as error:
            seconds = patience.pause(error)
            get_run_logger().warning("%s Trying again in %g s.", error, seconds)
            time.sleep(seconds)
