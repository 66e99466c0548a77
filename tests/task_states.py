"""The task runs of a flow run, as the Prefect server knows them."""

from __future__ import annotations

import time

from flows.cli.automations import ask

PATIENCE_SECONDS = 30.0


def task_states(api: str, flow_run: str, *names: str) -> dict[str, str]:
    """Name and state of a flow run's task runs, once these have ended: the server may write them seconds later."""
    query = {"flow_runs": {"id": {"any_": [flow_run]}}}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        rows = ask("POST", f"{api}/task_runs/filter", query).raise_for_status().json()
        found = {row["name"]: row["state_name"] for row in rows}
        if (
            all(found.get(name, "Running") not in ("Pending", "Running") for name in names)
            or time.monotonic() > deadline
        ):
            return found
        time.sleep(0.2)
