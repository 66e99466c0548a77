"""How long a flow starts its run again after failures, on a clock of the test's own."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import MagicMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.stages.jobs import IterationResult
from areal_tasks.stages.preflight import Checked
from areal_tasks.store.backend import Unavailable
from flows import execute
from flows.execute import LONGEST_PAUSE_SECONDS, RESTARTED_AFTER, WAIT_SECONDS, RestartBudget


class Attempt(NamedTuple):
    """One start of the run, which opens it and then fails."""

    seconds: float  # until it fails
    commits: int  # before that
    error: type[Exception]
    moved: int  # commits of an earlier start, that the next start finds


ATTEMPTS = st.builds(
    Attempt,
    st.sampled_from([0.0, 30.0, 100.0, 250.0]),
    st.sampled_from([0, 0, 0, 2]),
    st.sampled_from(RESTARTED_AFTER),
    st.sampled_from([0, 0, 0, 1]),
)


class Flow:
    """Calls `execute` with starts that go as planned, as long as there are any."""

    def __init__(self, plan: list[Attempt]) -> None:
        self.now = 0.0
        self.left = iter(plan)
        self.committed = 0
        self.failures: list[tuple[float, int]] = []  # when, and how many commits the flow had seen by then

    def loop(self, run: object, recipe: object, engines: object, tasks: object, closed: Any, ids: object) -> Any:
        """Takes the place of the loop over the iterations, which a start makes when it has opened the run."""

        def call() -> None:
            if (attempt := next(self.left, None)) is None:
                return
            self.now += attempt.seconds
            for _ in range(attempt.commits):
                closed(IterationResult(self.committed, 1, {}, 0.1))
                self.committed += 1
            self.failures.append((self.now, self.committed))
            self.committed += attempt.moved
            raise attempt.error("no engine")

        return MagicMock(side_effect=call)

    def sleep(self, seconds: float) -> None:
        assert 1.0 <= seconds <= LONGEST_PAUSE_SECONDS
        self.now += seconds

    def run(self) -> None:
        """Raises the error with which the flow ends."""
        opened = lambda *_, **__: SimpleNamespace(owner=1, committed=self.committed, record=MagicMock())  # noqa: E731
        stored = SimpleNamespace(store=MagicMock(url="store"), origin=None, changed={})
        contexts = ["Observer", "Waits", "ServiceLogs", "Pauses", "ServiceSamples", "log_start_and_end"]
        fakes: dict[str, Any] = {name: lambda *_, **__: nullcontext(MagicMock()) for name in contexts}
        fakes |= {
            "RestartBudget": lambda known: RestartBudget(known, clock=lambda: self.now),
            "time": SimpleNamespace(sleep=self.sleep),
            "check_inputs": lambda *_: Checked(MagicMock(), {}, cast(Any, stored)),
            "open_run": opened,
            "loop_of": lambda _: self.loop,
            "Startup": MagicMock(),
            "read_flow_run": lambda _: None,
            "get_run_logger": lambda: logging.getLogger("flow"),
        }
        fakes["Engines"] = lambda *_, **__: MagicMock(__exit__=lambda *_: None)
        with patch.multiple(execute, **fakes):
            execute.execute(MagicMock(), "r")


def _first_too_late(failures: list[tuple[float, int]]) -> int | None:
    """The failure that comes more than WAIT_SECONDS after the first one since a commit: by the definition."""
    for number, (when, seen) in enumerate(failures):
        since = next(time for time, before in failures if before == seen)
        if when > since + WAIT_SECONDS:
            return number
    return None


@given(plan=st.lists(ATTEMPTS, min_size=1, max_size=20))
def test_however_often_it_opens_its_run_a_flow_ends_600_s_after_a_failure_without_a_commit(plan: list[Attempt]) -> None:
    flow, error = Flow(plan), None
    try:
        flow.run()
    except RESTARTED_AFTER as ended:
        error = ended
    late = _first_too_late(flow.failures)
    assert late == (None if error is None else len(flow.failures) - 1)
    assert error is not None or len(flow.failures) == len(plan)


def test_a_store_that_was_never_there_is_a_mistake() -> None:
    with pytest.raises(Unavailable):
        RestartBudget(known=False).pause(Unavailable("no such host"))


def test_the_pauses_grow_until_a_commit() -> None:
    budget = RestartBudget(known=True, clock=lambda: 0.0)
    for committed in (3, 4):
        budget.saw(committed)
        pauses = [budget.pause(Unavailable("gone")) for _ in range(6)]
        assert pauses == [1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
