"""Secrets, which services are handed by an inherited descriptor: no environment in /proc shows them, at any time.

/proc/PID/environ keeps what a process was started with, whatever it removes from its environment later, and every
program of the same user can read it there; so can code of the user's in a verifier. Imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

TOKEN: Final = "AREAL_SERVICE_TOKEN"  # of a run's services
#: What services need to read and write a store on S3. They may also be in a service's own environment.
KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
#: What is in the environment of no service and of no verifier.
HIDDEN: Final = frozenset(
    {
        *(TOKEN, *KEYS, "AREAL_LLM_SERVER_TOKEN", "RAY_AUTH_TOKEN"),
        *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_API_DATABASE_CONNECTION_URL"),
        *("PREFECT_API_DATABASE_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_ENCRYPTION_KEY"),
        *("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_PASSWORD"),
    }
)
#: Names the descriptor.
DESCRIPTOR: Final = "AREAL_SECRETS_FD"

_held: dict[str, str] = {}
_receiving = threading.Lock()


def secret(name: str) -> str:
    """A secret that this process was handed, or that its environment has; empty if there is none."""
    _receive()
    return _held.get(name) or os.environ.get(name, "")


def keys() -> dict[str, str]:
    """Those of KEYS that this process has."""
    return {name: value for name in KEYS if (value := secret(name))}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in HIDDEN and name != DESCRIPTOR}


@contextmanager
def handed_over(**more: str) -> Iterator[tuple[int, dict[str, str]]]:
    """A descriptor to pass on to one process that is started inside, and the variable that names it.

    That process can ask for the KEYS that this one has, and for `more`.
    """
    given = keys() | more
    descriptor = os.memfd_create("secrets")
    try:
        os.write(descriptor, json.dumps(given).encode())
        yield descriptor, {DESCRIPTOR: str(descriptor)}
    finally:
        os.close(descriptor)


def keep(given: Mapping[str, str]) -> None:
    """Hold secrets that came in another way."""
    _held.update(given)


def _receive() -> None:
    """Take what this process was handed, once, so that none of its children inherits it."""
    with _receiving:
        if (descriptor := os.environ.pop(DESCRIPTOR, None)) is not None:
            with os.fdopen(int(descriptor), "rb") as file:
                file.seek(0)
                keep(json.load(file))
