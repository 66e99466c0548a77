"""`arealflow s3-keys`: stores the S3 keys of this shell on the Prefect server, for flow runs without keys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.cli.output import echo
from flows.cli.processes import asking, needed_server
from flows.credentials import BLOCK, NEEDED, keys_in_environment
from schemas.errors import UserError


def s3_keys(remove: Annotated[bool, typer.Option("--remove", help="Delete the keys from the server.")] = False) -> None:
    """Store the S3 keys of this shell's environment in a Secret block of the Prefect server.

    A flow run whose environment has no keys uses them. Stores AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and,
    if they are set, AWS_SESSION_TOKEN, the endpoint (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL) and the region (AWS_REGION,
    AWS_DEFAULT_REGION).
    """
    with asking(api_url := needed_server()):
        outcome = remove_keys() if remove else keep_keys()
    echo(f"{api_url}: {outcome}")


def keep_keys() -> str:
    """Replace the server's keys by those of the environment. Returns the message for the user."""
    from prefect.blocks.system import Secret

    keys = keys_in_environment()
    if missing := [name for name in NEEDED if name not in keys]:
        raise UserError(f"{missing[0]} is not set: export the keys for flow runs, then try again")
    Secret(value=json.dumps(keys)).save(BLOCK, overwrite=True)
    return f"keeps {', '.join(keys)} in the Secret block {BLOCK}"


def remove_keys() -> str:
    """Delete the keys from the server. Returns the message for the user."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.delete_block_document(client.read_block_document_by_name(BLOCK, "secret").id)
        except ObjectNotFound:
            return "keeps no S3 keys"
    return f"deleted the Secret block {BLOCK}"
