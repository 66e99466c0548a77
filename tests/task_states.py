"""The task runs of a flow run, as the Prefect server knows them."""

from __future__ import annotations

from prefect_api import ask
from waiting import wait_until


def task_states(api: str, flow_run: str, *names: str) -> dict[str, str]:
    """Name and state of a flow run's task runs, once these have ended: the server may write them seconds later."""
    query = {"flow_runs": {"id": {"any_": [flow_run]}}}
    found: dict[str, str] = {}

    def ended() -> bool:
        rows = ask("POST", f"{api}/task_runs/filter", query).raise_for_status().json()
        found.update({row["name"]: row["state_name"] for row in rows})
        return all(found.get(name, "Running") not in ("Pending", "Running") for name in names)

    wait_until(ended, f"the end of {', '.join(names)}")
    return found
