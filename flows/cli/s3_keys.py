"""`arealflow s3-keys`: has the Prefect server keep the S3 keys of this shell, for flow runs that have none."""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from flows.cli.alerts import server
from flows.credentials import NEEDED, PLACES, SECRETS
from schemas.errors import UserError


def s3_keys(
    remove: Annotated[bool, typer.Option("--remove", help="Delete the keys from the server again.")] = False,
) -> None:
    """Keep the S3 keys of this shell's environment in Secret blocks of the Prefect server.

    A flow run whose environment has no keys takes them from there. Keeps AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and,
    if it is set, AWS_SESSION_TOKEN; AWS_ENDPOINT_URL and AWS_REGION, if they are set, as Prefect variables.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    api_url = server()
    try:
        with temporary_settings({PREFECT_API_URL: api_url}):
            said = remove_keys() if remove else keep_keys()
    except (httpx.HTTPError, RuntimeError) as error:  # Prefect's client raises a RuntimeError as well
        raise UserError(f"no Prefect server answers at {api_url}: {error or type(error).__name__}") from error
    typer.echo(f"{api_url}: {said}")


def keep_keys() -> str:
    """Have the server hold what the environment has, and nothing that it has not. Returns what is to be said of it."""
    if missing := [name for name in NEEDED if not os.environ.get(name)]:
        raise UserError(f"{missing[0]} is not set: export the keys that flow runs are to have, then try again")
    for variable, name in (*SECRETS.items(), *PLACES.items()):
        if value := os.environ.get(variable):
            _put(variable, name, value)
        else:
            _delete(variable, name)  # a session token or an endpoint of other keys must not stay
    kept = [name for variable, name in (*SECRETS.items(), *PLACES.items()) if os.environ.get(variable)]
    return f"keeps {', '.join(kept)}"


def remove_keys() -> str:
    """Delete all of it from the server. Returns what is to be said of it."""
    gone = [name for variable, name in (*SECRETS.items(), *PLACES.items()) if _delete(variable, name)]
    return f"deleted {', '.join(gone)}" if gone else "keeps no S3 keys"


def _put(variable: str, name: str, value: str) -> None:
    from prefect.blocks.system import Secret
    from prefect.variables import Variable

    if variable in SECRETS:
        Secret(value=value).save(name, overwrite=True)
    else:
        Variable.set(name, value, overwrite=True)


def _delete(variable: str, name: str) -> bool:
    """Whether it was there."""
    from prefect.blocks.system import Secret
    from prefect.variables import Variable

    if variable in PLACES:
        return bool(Variable.unset(name))
    try:
        Secret.delete(name)
    except ValueError:  # what Prefect raises where there is none
        return False
    return True
