"""Creates or updates the work pool and the automations of `deployments/automations/` on a Prefect server."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any, Final

import httpx
import yaml

from flows.cli.processes import POOL
from schemas.errors import UserError

RECOVERY = "arealflow-recovery"
#: What the automation is where a keeper recovers flow runs: of two that act, one would overrule the other.
SWITCH: Final[dict[str, Any]] = {
    "description": "While this is enabled, the keeper runs crashed flow runs of the work pool arealflow again.",
    "actions": [{"type": "do-nothing"}],
}
TIMEOUT_SECONDS = 30.0
BUSY_PAUSES = (0.5, 1.0, 2.0, 4.0)


def install(api_url: str) -> None:
    """Create the work pool, and the switch of the keeper's recovery, which stays off if it is. UserError if refused."""
    answer = ask("POST", f"{api_url}/work_pools/", {"name": POOL, "type": "process"})  # the worker completes it
    if answer.is_error and answer.status_code != httpx.codes.CONFLICT:
        raise UserError(f"the Prefect server refused the work pool {POOL}: {answer.text[:500]}")
    put(api_url, {**read_automation(RECOVERY.removeprefix("arealflow-")), **SWITCH})


def put(api_url: str, wanted: dict[str, Any]) -> None:
    """Create an automation, or update the one of that name, enabled or disabled as it is. UserError if refused."""
    existing = find(api_url, wanted["name"])
    if existing is None:
        answer = ask("POST", f"{api_url}/automations/", wanted)
    else:
        update = {**wanted, "enabled": existing["enabled"]}
        answer = ask("PUT", f"{api_url}/automations/{existing['id']}", update)
    if answer.is_error:
        raise UserError(f"the Prefect server refused the automation {wanted['name']}: {answer.text[:500]}")


def remove(api_url: str, name: str) -> bool:
    """Delete the automation of that name; False if there is none."""
    existing = find(api_url, name)
    if existing is not None:
        ask("DELETE", f"{api_url}/automations/{existing['id']}").raise_for_status()
    return existing is not None


def read_automation(name: str) -> dict[str, Any]:
    """The content of `deployments/automations/<name>.yaml`: an automation, or several under `automations`."""
    values = yaml.safe_load(files("deployments").joinpath(f"automations/{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def find(api_url: str, name: str) -> dict[str, Any] | None:
    """The automation of that name on the server."""
    query = {"automations": {"name": {"any_": [name]}}}
    found: list[dict[str, Any]] = ask("POST", f"{api_url}/automations/filter", query).raise_for_status().json()
    return found[0] if found else None


def ask(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    params: dict[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> httpx.Response:
    """The server's response; retried on 503, with which Prefect reports a busy database before it writes anything."""
    for pause in (*BUSY_PAUSES, None):
        answer = httpx.request(method, url, json=body, params=params, timeout=timeout)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or pause is None:
            break
        time.sleep(pause)
    return answer
