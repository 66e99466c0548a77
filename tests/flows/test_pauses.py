"""What a flow does with its groups while its flow run is paused, by a real Prefect server."""

from __future__ import annotations

import logging

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect_api import ask
from waiting import wait_until

from areal_tasks.engines.watchdog import Watchdog
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
def test_groups_ahead_are_held_whatever_stops_the_flow_run_until_it_goes_on(api: str, kind: str, name: str) -> None:
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
