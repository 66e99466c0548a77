"""What a flow does with its groups while its flow run is paused, by a real Prefect server."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelling
from prefect_api import ask
from waiting import LIMIT, wait_until

from areal_tasks.engines.watchdog import Watchdog
from flows.cli.processes import FLOW_RUN
from flows.pauses import Pauses
from schemas.recipe.launcher import Launcher


def set_state(api: str, kind: str, name: str) -> None:
    body = {"state": {"type": kind, "name": name}, "force": True}  # only a deployment's can be suspended otherwise
    answer = ask("POST", f"{api}/flow_runs/{flow_run.get_id()}/set_state", body).raise_for_status().json()
    assert answer["status"] == "ACCEPT", answer


OTHER_STATE = pytest.mark.slow("the same by another state")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("PAUSED", "Paused"),
        pytest.param("PAUSED", "Suspended", marks=OTHER_STATE),
        pytest.param("CANCELLING", "Cancelling", marks=OTHER_STATE),
    ],
)
def test_groups_ahead_are_held_whatever_stops_the_flow_run_until_it_goes_on(
    api: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLOW_RUN, "of a worker, which ends those that are cancelled")
    told: list[bool] = []

    @flow
    def stopped() -> None:
        pauses = Pauses(logging.getLogger("run"), Watchdog(Launcher(), lambda name, why: None))
        pauses.on_stopping = told.append
        with pauses:
            set_state(api, kind, name)
            wait_until(lambda: told == [True], "the state to be noticed")
            set_state(api, "RUNNING", "Running")
            wait_until(lambda: told == [True, False], "the flow run to go on")

    stopped()


class Hanging:
    """A client whose answer comes when `left` is set: a state, or an error."""

    def __init__(self, answer: State[Any] | Exception) -> None:
        self.asked, self.left, self.answer = threading.Event(), threading.Event(), answer

    def read_flow_run(self, _: UUID) -> SimpleNamespace:
        self.asked.set()
        assert self.left.wait(LIMIT)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(state=self.answer)


@pytest.mark.parametrize("answer", [Cancelling(), RuntimeError("the client has been closed")])
def test_the_end_waits_for_no_answer_and_one_that_comes_later_does_nothing(
    answer: State[Any] | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pauses, "seconds", 0.01)
    monkeypatch.setenv(FLOW_RUN, "of a worker")
    pauses = Pauses(logging.getLogger("run"), Watchdog(Launcher(), lambda name, why: None))
    pauses.flow_run, pauses._client = str(uuid4()), cast(Any, client := Hanging(answer))
    told: list[bool] = []
    waited: list[float] = []
    pauses.on_stopping, join = told.append, pauses._thread.join
    with monkeypatch.context() as patch, pauses:
        patch.setattr(pauses._thread, "join", lambda seconds: waited.append(seconds))
        assert client.asked.wait(LIMIT)
        pauses.__exit__(None, None, None)
        pauses.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    client.left.set()
    join(LIMIT)
    assert not pauses._thread.is_alive()
    assert set(waited) == {0.0} and told == [] and caplog.messages == []


@flow
def cancelled(api: str) -> None:
    """A flow run that is cancelled; prints its id."""
    print(flow_run.get_id(), flush=True)
    with Pauses(logging.getLogger("run"), Watchdog(Launcher(), lambda name, why: None)):
        set_state(api, "CANCELLING", "Cancelling")
        wait_until(lambda: False, "the end")


def test_a_flow_run_that_no_worker_ends_ends_itself_when_it_is_cancelled(api: str) -> None:
    program = [sys.executable, "-c", "import sys, test_pauses; test_pauses.cancelled(sys.argv[1])", api]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PREFECT_API_URL": api}
    ended = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    state = ask("GET", f"{api}/flow_runs/{ended.stdout.strip()}").json()["state"]
    assert ended.returncode == -signal.SIGTERM and state["type"] == "CRASHED", state
