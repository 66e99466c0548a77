"""`arealflow alerts`: makes the Prefect server call a webhook when a run fails, stalls or degrades."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import httpx
import typer

from schemas.errors import UserError

WEBHOOK_VARIABLE: Final = "AREALFLOW_ALERT_WEBHOOK"
BLOCK: Final = "arealflow-alerts"
STALLED: Final = "arealflow-stalled"
#: Placeholder of the block's id in the YAML file.
PLACE: Final = "{{ webhook }}"
LEAST_SECONDS: Final = 10.0


def alerts(
    stalled_minutes: Annotated[
        float | None, typer.Option(help="Minutes without a committed iteration that count as a stall; 30 if not given.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alerts from the server.")] = False,
) -> None:
    """Send alerts of failed, crashed and stalled runs, and the warnings of the recipe's `alerts`, to a webhook.

    The environment variable AREALFLOW_ALERT_WEBHOOK holds its address, which the server keeps in a block. Without the
    variable, the alerts are updated and the address stays.
    """
    api_url = server()
    try:
        message = remove_alerts(api_url) if remove else install_alerts(api_url, stalled_minutes)
    except httpx.HTTPError as error:
        raise UserError(f"no Prefect server answers at {api_url}: {error or type(error).__name__}") from error
    typer.echo(message)


def server() -> str:
    """The API of the Prefect server that records runs. UserError if there is none."""
    from flows.cli.processes import named_server

    if not (api_url := named_server()):
        raise UserError("no Prefect server runs here: start it with `arealflow up`, or name one in PREFECT_API_URL")
    return api_url


def install_alerts(api_url: str, stalled_minutes: float | None = None) -> str:
    """Save the automations and the block that they call on the server. Returns the message for the user."""
    from flows.cli.automations import put, read_automation

    file = read_automation("alerts")
    block = save_block(api_url, os.environ.get(WEBHOOK_VARIABLE, ""))
    for automation in [filled(automation, block, stalled_minutes) for automation in file["automations"]]:
        put(api_url, automation)
    names = "\n".join(f"  {automation['name']}: {automation['description']}" for automation in file["automations"])
    return f"alerts on {api_url}:\n{names}"


def remove_alerts(api_url: str) -> str:
    """Delete the automations; the block with the address stays. Returns the message for the user."""
    from flows.cli.automations import read_automation, remove

    names = [automation["name"] for automation in read_automation("alerts")["automations"]]
    removed = [name for name in names if remove(api_url, name)]
    return f"removed {len(removed)} alerts from {api_url}; the address stays in the block {BLOCK}"


def filled(automation: dict[str, Any], block: str, stalled_minutes: float | None) -> dict[str, Any]:
    """The automation with the id of the webhook block and, for the one of stalled runs, its time limit."""
    actions = [{**action, "block_document_id": block} for action in automation["actions"]]
    if any(action["block_document_id"] != PLACE for action in automation["actions"]):
        raise UserError(f"deployments/automations/alerts.yaml: {automation['name']}: block_document_id is not {PLACE}")
    if stalled_minutes is None or automation["name"] != STALLED:
        return {**automation, "actions": actions}
    seconds = 60.0 * stalled_minutes
    if seconds < LEAST_SECONDS:
        raise UserError(f"--stalled-minutes {stalled_minutes:g}: Prefect takes no less than {LEAST_SECONDS:g} seconds")
    return {**automation, "actions": actions, "trigger": {**automation["trigger"], "within": seconds}}


def save_block(api_url: str, address: str) -> str:
    """Save `address` in the webhook block; returns the block's id. An empty address keeps the existing block.

    UserError if there is neither, or the address is not an http(s) URL.
    """
    from prefect.blocks.webhook import Webhook
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if not address:
        return known_block(api_url)
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{WEBHOOK_VARIABLE} should be an http:// or https:// address")  # it is a secret: not shown
    with temporary_settings({PREFECT_API_URL: api_url}):
        webhook = Webhook(method="POST", url=address, headers={"content-type": "application/json"})
        return str(webhook.save(BLOCK, overwrite=True))


def known_block(api_url: str) -> str:
    """Id of the webhook block on the server. UserError if there is none."""
    answer = httpx.get(f"{api_url}/block_types/slug/webhook/block_documents/name/{BLOCK}", timeout=30)
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise UserError(f"where should alerts go? Put the webhook's address into {WEBHOOK_VARIABLE} and try again")
    return str(answer.raise_for_status().json()["id"])
