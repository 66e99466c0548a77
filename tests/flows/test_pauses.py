"""What a flow does with its groups while its flow run is paused, by a real Prefect server."""

from __future__ import annotations

import logging

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect_api import ask
from waiting import wait_until

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


def test_a_flow_run_that_no_worker_ends_ends_itself_when_it_is_cancelled(api: str) -> None:
    found: list[str] = []

    @flow
    def cancelled() -> None:
        found.append(flow_run.get_id() or "")
        with Pauses(logging.getLogger("run"), Watchdog(Launcher(), lambda name, why: None)):
            set_state(api, "CANCELLING", "Cancelling")
            wait_until(lambda: False, "the end")

    with pytest.raises(KeyboardInterrupt):
        cancelled()
    state = ask("GET", f"{api}/flow_runs/{found[0]}").json()["state"]
    assert state["type"] == "CRASHED", state
