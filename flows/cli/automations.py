"""Puts the automations of `deployments/automations/` on a Prefect server, or brings those that are there up to date."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import httpx

from schemas.errors import UserError
from schemas.recipe.yaml_text import parse_yaml

RECOVERY = "arealflow-recovery"
INSTALLED = ("recovery",)  # the others need an address to send to
TIMEOUT_SECONDS = 30.0


def install(api_url: str) -> None:
    """Create or update what `up` ships. One that a person has disabled stays so. UserError if the server refuses."""
    for name in INSTALLED:
        wanted = read_automation(name)
        there = find(api_url, wanted["name"])
        if there is None:
            answer = httpx.post(f"{api_url}/automations/", json=wanted, timeout=TIMEOUT_SECONDS)
        else:
            wanted["enabled"] = there["enabled"]
            answer = httpx.put(f"{api_url}/automations/{there['id']}", json=wanted, timeout=TIMEOUT_SECONDS)
        if answer.is_error:
            raise UserError(f"the Prefect server refused the automation {wanted['name']}: {answer.text[:500]}")


def read_automation(name: str) -> dict[str, Any]:
    """The automation in `deployments/automations/<name>.yaml`."""
    origin = f"automations/{name}.yaml"
    values = parse_yaml(files("deployments").joinpath(origin).read_text(), origin)
    assert isinstance(values, dict)
    return values


def find(api_url: str, name: str) -> dict[str, Any] | None:
    """The automation of that name on the server."""
    query = {"automations": {"name": {"any_": [name]}}}
    answer = httpx.post(f"{api_url}/automations/filter", json=query, timeout=TIMEOUT_SECONDS)
    found: list[dict[str, Any]] = answer.raise_for_status().json()
    return found[0] if found else None
