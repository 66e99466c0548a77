"""Puts the automations of `deployments/automations/` on a Prefect server, or brings those that are there up to date."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

import httpx
import yaml

from schemas.errors import UserError

RECOVERY = "arealflow-recovery"
INSTALLED = ("recovery",)  # the others need an address to send to
TIMEOUT_SECONDS = 30.0
BUSY_PAUSES = (0.5, 1.0, 2.0, 4.0)


def install(api_url: str) -> None:
    """Create or update what `up` ships. One that a person has disabled stays so. UserError if the server refuses."""
    for name in INSTALLED:
        put(api_url, read_automation(name))


def put(api_url: str, wanted: dict[str, Any]) -> None:
    """Create an automation, or update the one of that name, disabled if it is. UserError if the server refuses."""
    there = find(api_url, wanted["name"])
    if there is None:
        answer = ask("POST", f"{api_url}/automations/", wanted)
    else:
        same = {**wanted, "enabled": there["enabled"]}
        answer = ask("PUT", f"{api_url}/automations/{there['id']}", same)
    if answer.is_error:
        raise UserError(f"the Prefect server refused the automation {wanted['name']}: {answer.text[:500]}")


def remove(api_url: str, name: str) -> bool:
    """Delete the automation of that name; False if there is none."""
    there = find(api_url, name)
    if there is not None:
        ask("DELETE", f"{api_url}/automations/{there['id']}").raise_for_status()
    return there is not None


def read_automation(name: str) -> dict[str, Any]:
    """What `deployments/automations/<name>.yaml` holds: an automation, or several under `automations`."""
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
    """The answer; asked again where Prefect's database was busy, which it says before anything is written."""
    for pause in (*BUSY_PAUSES, None):
        answer = httpx.request(method, url, json=body, params=params, timeout=timeout)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or pause is None:
            break
        time.sleep(pause)
    return answer
