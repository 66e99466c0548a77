"""Requests to a Prefect server, with a limit for busy machines, and the task runs of a flow run."""

from __future__ import annotations

from functools import partial

from waiting import LIMIT, wait_until

from flows.cli import automations

ask = partial(automations.ask, timeout=LIMIT)


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
