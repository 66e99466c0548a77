"""What inference servers answer: errors by status, streams of events, and the weights of what was generated.

SGLang tells an error by the HTTP status, or by an event where the stream has begun already (http_server.py,
tokenizer_manager.py of 0.5.17).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, TypeVar

import aiohttp
import orjson

from schemas.errors import UserError

T = TypeVar("T")
INTERRUPTED: Final = 499  # SGLang's status for a request that was aborted before its model saw it
ABORTED: Final[dict[str, Any]] = {
    "text": "",
    "meta_info": {
        "finish_reason": {"type": "abort"}, "output_token_logprobs": [], "completion_tokens": 0, "weight_version": ""
    },
}  # fmt: skip


class ServerDown(Exception):
    """A server did not answer, or answered that it cannot serve. The request may be repeated elsewhere."""


class WrongVersion(ServerDown):
    """A server generated with, or holds, other weights than it was told to."""


class Refused(UserError):
    """A server refused a request as wrong (HTTP 4xx); the message holds its reason."""


class Interrupted(Exception):
    """The request was aborted before anything was generated."""


def check_status(where: str, status: int, reason: str) -> None:
    """Raise what a status of 400 or more means: ServerDown, Refused or Interrupted. `where`: who answered what."""
    if status >= 500:
        raise ServerDown(f"{where} answered {status}: {reason}")
    if status == INTERRUPTED:
        raise Interrupted
    if status >= 400:
        raise Refused(f"{where} answered {status}: {reason}")


def reason_of(content: bytes) -> str:
    """The server's error message, out of `{"error": …}` or `{"message": …}` where it sent that."""
    try:
        found = orjson.loads(content)
        error = found["error"] if "error" in found else found["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:500].decode(errors="replace")
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


async def read_events(where: str, content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The answers that a stream of server-sent events brings; the one with a finish reason when the stream has ended.

    Raises what an event says that tells of an error, and ServerDown if the stream ends before the answer does.
    """
    last: dict[str, Any] | None = None
    async for event in _data(content):
        answer = orjson.loads(event)
        _check_event(where, event, answer)
        if answer["meta_info"]["finish_reason"] is None:
            yield answer
        else:
            last = answer
    if last is None:
        raise ServerDown(f"{where}: the stream ended before the answer")
    yield last


async def _data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """What follows `data: ` in each event but the last, which says that there are no more."""
    rest = b""
    async for piece in content.iter_any():  # an event may be longer than what the reader takes for a line
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if (data := event.removeprefix(b"data: ")) != b"[DONE]":
                yield data


def _check_event(where: str, event: bytes, answer: dict[str, Any]) -> None:
    if "error" in answer:
        check_status(where, int(answer["error"]["code"]), reason_of(event))
    reason = answer["meta_info"]["finish_reason"] or {}
    check_status(where, int(reason.get("status_code") or 200), str(reason.get("message")))


def version_runs(meta: dict[str, Any]) -> list[tuple[Any, int]]:
    """(version, tokens) of an answer's segments; the embedded server tells where weights changed on the way."""
    if "weight_versions" in meta:
        return list(meta["weight_versions"])
    tokens = len(meta["output_token_logprobs"])
    return [(meta["weight_version"], tokens)] if tokens else []


def stale_runs(meta: dict[str, Any]) -> list[tuple[bool, int]]:
    """(whether the cache held keys and values of older weights, tokens) of an answer's segments; see `Piece`."""
    return list(meta.get("stale_kv", [(False, len(meta["output_token_logprobs"]))]))


def each_token(runs: Iterable[tuple[T, int]]) -> list[T]:
    """The value of each token, out of (value, tokens) of segments."""
    return [value for value, count in runs for _ in range(count)]


def check_versions(where: str, answers: Iterable[dict[str, Any]], first: int, last: int) -> None:
    """Raise WrongVersion if a token was generated with weights before `first` or after `last`."""
    found = {int(version) for answer in answers for version, _ in version_runs(answer["meta_info"])}
    if not all(first <= version <= last for version in found):
        raise WrongVersion(f"{where} generated with weights {sorted(found)}, expected {first} to {last}")
