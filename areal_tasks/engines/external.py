"""Inference servers that run already and that no run stops: `AREAL_LLM_SERVER_ADDRS=host:port,host:port`.

The run has not started them, so it checks by their answers those settings that would do harm unnoticed. Those that were
started with `engines/sglang/child.py` load weights from the store, on any machine; plain SGLang loads a folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from socket import gethostname
from typing import Any, Final
from urllib.parse import urlsplit

from schemas.errors import UserError

ADDRESSES: Final = "AREAL_LLM_SERVER_ADDRS"
SERVER_TOKEN: Final = "AREAL_LLM_SERVER_TOKEN"
#: Paths that `sglang/from_store.py` adds to SGLang's API.
FETCH: Final = "/fetch_weights"
STORE_OF: Final = "/weights_store"


def external_servers() -> list[str]:
    """The base URLs that the environment names, in order; none if a run starts its own. UserError: one is malformed."""
    parts = (part.strip() for part in os.environ.get(ADDRESSES, "").split(","))
    return [_base_url(part) for part in parts if part]


def external_token() -> str:
    """The bearer token of those servers; empty if they require none."""
    return os.environ.get(SERVER_TOKEN, "")


def check_encrypted(urls: Sequence[str], trusted: bool) -> None:
    """Check that what servers of other machines are sent, token and prompts, is encrypted, or the network `trusted`.

    Raises:
        UserError: it is neither.
    """
    plain = [
        url for url in urls if (parts := urlsplit(url)).scheme == "http" and not _on_loopback(parts.hostname or "")
    ]
    if plain and not trusted:
        raise UserError(
            f"{ADDRESSES}: {plain[0]} would be sent prompts, and {SERVER_TOKEN} if it is set, unencrypted. Start the "
            "server with --ssl-keyfile and --ssl-certfile and name it by https://… (docs/guides/gpus.md), or set "
            "inference.trust_network=true if that network is safe"
        )


def _on_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


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


#: At this temperature all tokens are equally likely, up to FLAT nats, whatever the model.
HOT: Final = 10_000.0
FLAT: Final = 0.2
PROBE: Final[dict[str, Any]] = {
    "input_ids": [[0]] * 16,
    "sampling_params": {"max_new_tokens": 1, "temperature": HOT},
    "return_logprob": True,
}


def folder_not_visible(refusal: str, folder: str) -> str:
    """The error message for a server that has refused to load the weights in `folder`."""
    return (
        f"{refusal}. The weights are in the folder {folder} of {gethostname()}: a server of {ADDRESSES} that does not "
        "see it has to be started with `python -m areal_tasks.engines.sglang.child`, which reads the store, and the "
        "store has to be at s3://… (docs/guides/gpus.md)"
    )


def check_versions_reported(where: str, answers: Sequence[dict[str, Any]]) -> None:
    """UserError if a server whose weights change during requests does not report which sampled each token."""
    if not all("weight_versions" in answer["meta_info"] for answer in answers):
        raise UserError(
            f"the inference server {where} does not report which weights sampled each token of an answer, so they must "
            "not change during a request: set rollout.interruption to abort or drain, or start it with "
            "`python -m areal_tasks.engines.sglang.child`"
        )


def check_temperature(where: str, answers: Sequence[dict[str, Any]]) -> None:
    """UserError if the logprobs in a server's answers to PROBE are those before the temperature is applied.

    SGLang does not report which it gives, and near temperature 1 the tokens trained on do not show it either.
    """
    logprobs = [logprob for answer in answers for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    if max(logprobs) - min(logprobs) > FLAT:
        raise UserError(
            f"the inference server {where} gives log-probabilities before the temperature is applied: tokens sampled "
            f"at temperature {HOT:g}, where all are equally likely, have some from {min(logprobs):.3g} to "
            f"{max(logprobs):.3g}. Start it again without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
