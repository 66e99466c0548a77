"""Inference servers that run already and are not ours to stop: `AREAL_LLM_SERVER_ADDRS=host:port,host:port`."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

from schemas.errors import UserError

ADDRESSES: Final = "AREAL_LLM_SERVER_ADDRS"
SERVER_TOKEN: Final = "AREAL_LLM_SERVER_TOKEN"


def external_servers() -> list[str]:
    """The base URLs that the environment names, in order; empty if a run is to start its own servers.

    Raises:
        UserError: an address is neither `host:port` nor `http://host:port` (or https).
    """
    parts = (part.strip() for part in os.environ.get(ADDRESSES, "").split(","))
    return [_base_url(part) for part in parts if part]


def external_token() -> str:
    """The bearer token of those servers; empty if they ask for none."""
    return os.environ.get(SERVER_TOKEN, "")


def _base_url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    try:
        complete = parts.scheme in ("http", "https") and parts.hostname and (parts.port or "://" in address)
    except ValueError:
        complete = False
    if not complete:
        raise UserError(f"{ADDRESSES}: '{address}' should look like host:port or http://host:port")
    return url.rstrip("/")
