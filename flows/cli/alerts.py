"""`arealflow alerts`: has the Prefect server call a webhook when a run fails, stalls or goes wrong."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import httpx
import typer

from schemas.errors import UserError

WEBHOOK_VARIABLE: Final = "AREALFLOW_ALERT_WEBHOOK"
BLOCK: Final = "arealflow-alerts"
STALLED: Final = "arealflow-stalled"
#: Where the file leaves room for the block's id.
PLACE: Final = "{{ webhook }}"
LEAST_SECONDS: Final = 10.0


def alerts(
    stalled_minutes: Annotated[
        float | None, typer.Option(help="Minutes without a committed iteration that count as a stall; 30 if not given.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the alerts off the server again.")] = False,
) -> None:
    """Alerts of failed, crashed and stalled runs, and of what the recipe's `alerts` warns about, to a webhook.

    The environment variable AREALFLOW_ALERT_WEBHOOK holds its address; the server keeps it in a block. Again without
    it: the alerts are brought up to date, and the address stays.
    """
    api_url = server()
    try:
        said = remove_alerts(api_url) if remove else install_alerts(api_url, stalled_minutes)
    except httpx.HTTPError as error:
        raise UserError(f"no Prefect server answers at {api_url}: {error or type(error).__name__}") from error
    typer.echo(said)


def server() -> str:
    """The API of the server that runs are recorded on. UserError if there is none."""
    from flows.cli.machine import named_server

    if not (api_url := named_server()):
        raise UserError("no Prefect server runs here: start it with `arealflow up`, or name one in PREFECT_API_URL")
    return api_url


def install_alerts(api_url: str, stalled_minutes: float | None = None) -> str:
    """Put the automations and the block that they call on the server. Returns what is to be said of it."""
    from flows.cli.automations import put, read_automation

    file = read_automation("alerts")
    block = save_block(api_url, os.environ.get(WEBHOOK_VARIABLE, ""))
    for automation in [filled(automation, block, stalled_minutes) for automation in file["automations"]]:
        put(api_url, automation)
    names = "\n".join(f"  {automation['name']}: {automation['description']}" for automation in file["automations"])
    return f"alerts on {api_url}:\n{names}"


def remove_alerts(api_url: str) -> str:
    """Delete the automations; the block with the address stays."""
    from flows.cli.automations import read_automation, remove

    names = [automation["name"] for automation in read_automation("alerts")["automations"]]
    gone = [name for name in names if remove(api_url, name)]
    return f"removed {len(gone)} alerts from {api_url}; the address stays in the block {BLOCK}"


def filled(automation: dict[str, Any], block: str, stalled_minutes: float | None) -> dict[str, Any]:
    """The automation, calling the webhook `block`."""
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
    """Id of the webhook block, with `address` in it; without one, of the block that is there.

    UserError if there is neither, or the address is none.
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
