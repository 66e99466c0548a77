"""S3 keys of a flow run: those of its environment, else those that the Prefect server keeps in a `Secret` block.

They are put into the environment of the flow process, which its services inherit, and nowhere else. Keys already in the
environment are used as they are, and never mixed with those that Prefect keeps. A pair of keys is stored in one block,
so that no reader gets an old key id with a new secret.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx

from areal_tasks.store.backend import default_url, s3_endpoint, s3_region
from schemas.errors import UserError

#: The Secret block: a JSON object with some of the environment variables SECRETS and PLACES.
BLOCK: Final = "areal-s3-keys"
NEEDED: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
SECRETS: Final = (*NEEDED, "AWS_SESSION_TOKEN")
#: Variables that say where the store is, and the functions that read them (or their alternatives).
PLACES: Final[Mapping[str, Callable[[], str]]] = {"AWS_ENDPOINT_URL": s3_endpoint, "AWS_REGION": s3_region}
#: How long requests to a Prefect server that does not answer are retried.
RETRY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS: Final = 8.0


def load_s3_keys(store_url: str) -> bool:
    """If the store is on S3 and the environment has no keys, set those that Prefect keeps. Returns whether it did.

    Errors as of `read_prefect_keys`; UserError if the Prefect server has not answered for a minute.
    """
    if not on_s3(store_url) or set_key_variables():
        return False
    if kept := _kept_patiently():
        set_keys(kept)
    return bool(kept)


def on_s3(store_url: str) -> bool:
    """Whether this store (empty: the default store) is on S3, so that it needs keys."""
    return (store_url or default_url()).startswith("s3://")


def set_key_variables() -> list[str]:
    return [name for name in NEEDED if os.environ.get(name)]


def keys_in_environment() -> dict[str, str]:
    """The keys of this environment, with the endpoint and the region that a store on S3 would use."""
    values = {name: os.environ.get(name, "") for name in SECRETS} | {name: read() for name, read in PLACES.items()}
    return {name: value for name, value in values.items() if value}


def set_keys(kept: Mapping[str, str]) -> None:
    """Put kept keys into the environment in place of all others; endpoint and region set there take precedence."""
    for name in SECRETS:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in kept.items() if name not in PLACES or not PLACES[name]()})


def read_prefect_keys() -> dict[str, str]:
    """The keys that the Prefect server keeps, with endpoint and region if it has them; empty if it has no keys.

    UserError if the block holds something else; httpx.HTTPError if the server does not answer, or refuses.
    """
    from prefect.client.orchestration import get_client  # takes a second
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            return _parsed(client.read_block_document_by_name(BLOCK, "secret").data["value"])
        except ObjectNotFound:
            return {}


def _kept_patiently() -> dict[str, str]:
    from prefect.logging import get_logger  # not that of the flow run, which sends to the server that does not answer

    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return read_prefect_keys()
        except httpx.TransportError as error:
            if time.monotonic() - began >= RETRY_SECONDS:
                raise UserError(
                    f"The Prefect server does not answer ({error or type(error).__name__}), and this environment has "
                    f"no {NEEDED[0]}: check that it runs, or export S3 keys before `arealflow up`, then retry this run."
                ) from error
            get_logger("s3-keys").warning(
                "The Prefect server, which may keep S3 keys, does not answer: retrying in %g s.", pause
            )
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0 * pause)


def _parsed(value: object) -> dict[str, str]:
    """The keys in the block, which holds a JSON object or, if the UI's form made it, the text of one."""
    again = "make it again with `arealflow s3-keys` (docs/operate/s3.md)"
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise UserError(f"Prefect's Secret block {BLOCK} is no JSON object of environment variables: {again}.")
    if missing := [name for name in NEEDED if not found.get(name)]:
        raise UserError(f"Prefect's Secret block {BLOCK} has no {missing[0]}: {again}.")
    return {name: found[name] for name in (*SECRETS, *PLACES) if found.get(name)}
