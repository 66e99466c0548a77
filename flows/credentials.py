"""S3 keys of a flow run: those of its environment, else those that the Prefect server keeps in `Secret` blocks.

They go into the environment of the flow process, which its services inherit, and nowhere else. Keys that the
environment has are used as they are: they are never mixed with what Prefect keeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from areal_tasks.store.backend import default_url
from schemas.errors import UserError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

#: Environment variable -> the Secret block that stands for it.
SECRETS: Final[Mapping[str, str]] = {
    "AWS_ACCESS_KEY_ID": "areal-s3-access-key-id",
    "AWS_SECRET_ACCESS_KEY": "areal-s3-secret-access-key",
    "AWS_SESSION_TOKEN": "areal-s3-session-token",
}
#: Environment variable -> the Prefect variable that stands for it: these are no secrets.
PLACES: Final[Mapping[str, str]] = {"AWS_ENDPOINT_URL": "areal-s3-endpoint-url", "AWS_REGION": "areal-s3-region"}
NEEDED: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def take_s3_keys(store_url: str) -> bool:
    """Where the store is on S3 and this process has no keys, give it those that Prefect keeps; whether it did.

    Raises:
        UserError: one of the two blocks is there and the other is not.
        httpx.HTTPError: the Prefect server does not answer.
    """
    if not on_s3(store_url) or in_environment():
        return False
    kept = kept_by_prefect()
    os.environ.update(kept)
    return bool(kept)


def on_s3(store_url: str) -> bool:
    """Whether this store, the default one if it is empty, needs keys."""
    return (store_url or default_url()).startswith("s3://")


def in_environment() -> list[str]:
    """The variables with keys that are set."""
    return [name for name in NEEDED if os.environ.get(name)]


def kept_by_prefect() -> dict[str, str]:
    """The keys that the Prefect server keeps, with endpoint and region as set here or there; empty if it has none."""
    from prefect.client.orchestration import get_client  # takes a second

    with get_client(sync_client=True) as client:
        secrets = _there({variable: _secret(client, block) for variable, block in SECRETS.items()})
        missing = [SECRETS[name] for name in NEEDED if name not in secrets]
        if missing and secrets:
            raise UserError(f"The Prefect server keeps S3 keys, but has no Secret block {missing[0]}: make it too.")
        return {**secrets, **_there({name: _place(client, name) for name in PLACES})} if secrets else {}


def _secret(client: SyncPrefectClient, block: str) -> str:
    """What the block holds; empty if there is none."""
    from prefect.exceptions import ObjectNotFound

    try:
        return str(client.read_block_document_by_name(block, "secret").data["value"])
    except ObjectNotFound:
        return ""


def _place(client: SyncPrefectClient, variable: str) -> str:
    """What the environment says, else the Prefect variable; empty if neither does."""
    if said := os.environ.get(variable):
        return said
    found = client.read_variable_by_name(PLACES[variable])
    return "" if found is None else str(found.value)


def _there(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}
