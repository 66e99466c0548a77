"""The work pool and the automations of `deployments/automations/` on a Prefect server, and `arealflow alerts`."""

from __future__ import annotations

import os
import time
from base64 import b64encode
from importlib.resources import files
from typing import Annotated, Any, Final

import httpx
import typer
import yaml

from areal_tasks.launchers.gpus import visible_gpus
from flows.cli.output import echo
from flows.cli.processes import CREDENTIALS, LOGIN, POOL, REFUSED, asking, needed_server
from schemas.errors import UserError

RECOVERY = "arealflow-recovery"
#: What the automation is where a keeper recovers flow runs: of two that act, one would overrule the other.
SWITCH: Final[dict[str, Any]] = {
    "description": "While this is enabled, the keeper runs crashed flow runs of the work pool arealflow again.",
    "actions": [{"type": "do-nothing"}],
}
TIMEOUT_SECONDS = 30.0
BUSY_PAUSES = (0.5, 1.0, 2.0, 4.0)
WEBHOOK_VARIABLE: Final = "AREALFLOW_ALERT_WEBHOOK"
BLOCK: Final = "arealflow-alerts"
STALLED: Final = "arealflow-stalled"
LEAST_SECONDS: Final = 10.0


def install(api_url: str) -> None:
    """Create the work pool, and the switch of the keeper's recovery, which stays off if it is. UserError if refused.

    On a machine with GPUs the pool runs one flow run at a time: two would take each other's memory. An existing pool
    keeps its limit.
    """
    pool = {"name": POOL, "type": "process", "concurrency_limit": 1 if visible_gpus() else None}
    answer = ask("POST", f"{api_url}/work_pools/", pool)  # the worker completes it
    if answer.is_error and answer.status_code != httpx.codes.CONFLICT:
        raise UserError(f"the Prefect server refused the work pool {POOL}: {_reason(answer)}")
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
        raise UserError(f"the Prefect server refused the automation {wanted['name']}: {_reason(answer)}")


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
    query = {"automations": {"name": {"any_": [name]}}}
    found: list[dict[str, Any]] = ask("POST", f"{api_url}/automations/filter", query).raise_for_status().json()
    return found[0] if found else None


def ask(method: str, url: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS) -> httpx.Response:
    """The server's response; retried on 503, with which Prefect reports a busy database before it writes anything."""
    headers = {}  # as Prefect's client sends them, for the credentials in this environment
    if user_and_password := os.environ.get(LOGIN):
        headers["Authorization"] = f"Basic {b64encode(user_and_password.encode()).decode()}"
    elif key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for pause in (*BUSY_PAUSES, None):
        answer = httpx.request(method, url, json=body, headers=headers, timeout=timeout)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or pause is None:
            break
        time.sleep(pause)
    return answer


def _reason(answer: httpx.Response) -> str:
    return CREDENTIALS if answer.status_code in REFUSED else answer.text[:500]


# ── alerts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def alerts(
    stalled_minutes: Annotated[
        float | None, typer.Option(help="Minutes without a committed iteration that count as a stall; 30 if not given.")
    ] = None,
    no_more: Annotated[bool, typer.Option("--remove", help="Remove the alerts from the server.")] = False,
) -> None:
    """Send alerts of failed, crashed and stalled runs, and the warnings of the recipe's `alerts`, to a webhook.

    The environment variable AREALFLOW_ALERT_WEBHOOK holds its address, which the server keeps in a block. Without the
    variable, the alerts are updated and the address stays.
    """
    with asking(api_url := needed_server()):
        echo(remove_alerts(api_url) if no_more else install_alerts(api_url, stalled_minutes))


def install_alerts(api_url: str, stalled_minutes: float | None) -> str:
    """Save the automations and the block that they call on the server. Returns the message for the user."""
    file = read_automation("alerts")
    block = save_block(api_url, os.environ.get(WEBHOOK_VARIABLE, ""))
    for automation in [filled(automation, block, stalled_minutes) for automation in file["automations"]]:
        put(api_url, automation)
    names = "\n".join(f"  {automation['name']}: {automation['description']}" for automation in file["automations"])
    return f"alerts on {api_url}:\n{names}"


def remove_alerts(api_url: str) -> str:
    """Delete the automations; the block with the address stays. Returns the message for the user."""
    names = [automation["name"] for automation in read_automation("alerts")["automations"]]
    removed = [name for name in names if remove(api_url, name)]
    return f"removed {len(removed)} alerts from {api_url}; the address stays in the block {BLOCK}"


def filled(automation: dict[str, Any], block: str, stalled_minutes: float | None) -> dict[str, Any]:
    """The automation with the id of the webhook block and, for the one of stalled runs, its time limit."""
    actions = [{**action, "block_document_id": block} for action in automation["actions"]]
    if stalled_minutes is None or automation["name"] != STALLED:
        return {**automation, "actions": actions}
    seconds = 60.0 * stalled_minutes
    if seconds < LEAST_SECONDS:
        raise UserError(f"--stalled-minutes {stalled_minutes:g}: Prefect takes no less than {LEAST_SECONDS:g} seconds")
    return {**automation, "actions": actions, "trigger": {**automation["trigger"], "within": seconds}}


def save_block(api_url: str, address: str) -> str:
    """Save `address` in the webhook block, or keep the existing one if it is empty; its id. UserError without any."""
    from prefect.blocks.webhook import Webhook

    if not address:
        answer = ask("GET", f"{api_url}/block_types/slug/webhook/block_documents/name/{BLOCK}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise UserError(f"where should alerts go? Put the webhook's address into {WEBHOOK_VARIABLE} and try again")
        return str(answer.raise_for_status().json()["id"])
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{WEBHOOK_VARIABLE} should be an http:// or https:// address")  # it is a secret: not shown
    webhook = Webhook(method="POST", url=address, headers={"content-type": "application/json"})
    return str(webhook.save(BLOCK, overwrite=True))
