"""Where the environment says that an S3 store is: each value has two names, and the first that is set counts."""

from __future__ import annotations

import os
from typing import Final

_ENDPOINT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGION: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


def endpoint() -> str:
    """The URL of the S3 server; empty for AWS."""
    return _first(_ENDPOINT)


def region() -> str:
    """The region; empty if the environment names none."""
    return _first(_REGION)


def _first(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
