"""Concurrent requests of a trainer to all its inference servers while it does its own part, and their outcome."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Final

import httpx

from areal_tasks.engines.trainer.commands import Send
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.ranks import end_group
from schemas.errors import UserError

log = logging.getLogger(__name__)
TIMEOUT_SECONDS: Final = 120.0
REMEDY: Final = "see its log; inference.transport=store sends the weights another way"

Gone = dict[str, str]  # from the address of a server that failed to the reason
Calls = dict[str, Future[None]]  # by the address


class WeightTransferRejected(UserError):
    """A server refused the weights; the message holds its reason."""


class Unanswered(Exception):
    """A server died, hangs, or failed internally: the request is not at fault."""


def end_stuck(group: Group, error: Exception) -> None:
    """End this trainer, which waits for a server that failed and cannot be interrupted.

    It first answers with a refusal, which a restart would only repeat. If a server died or failed internally, it sends
    no answer: the flow restarts services that ended, and retries the command.
    """
    log.critical("the trainer cannot stop waiting for a server that failed (%s), and ends", error)
    sys.stderr.flush()
    if isinstance(error, WeightTransferRejected):
        end_group(group, error)
    else:
        os._exit(1)


@dataclass(frozen=True)
class Watch:
    """What to do if the trainer's part has not ended `seconds` after a server failed."""

    stuck: Callable[[Exception], None]  # receives the server's failure: a WeightTransferRejected if it refused
    seconds: float = 20.0


@dataclass(frozen=True)
class Orders:
    """One POST to every receiver of `command`, with one body per receiver."""

    command: Send
    path: str
    bodies: Sequence[dict[str, Any]]


def post_all(
    orders: Orders,
    own_part: Callable[[], None] | None = None,
    abort: Callable[[], None] | None = None,
    grace_seconds: float = TIMEOUT_SECONDS,
    watch: Watch | None = None,
) -> Gone:
    """Send the requests, run `own_part` concurrently, and wait for the answers; returns the receivers that failed.

    In a collective operation one failure fails all: `abort` ends it, and receivers that have not answered
    `grace_seconds` later count as failed too. `watch` checks that `own_part` ends after a failure: NCCL waits for a
    member that failed before the group was connected, and cannot be interrupted.

    Raises:
        WeightTransferRejected: a receiver refused, and none failed; the others may still be working.
        Exception: what `own_part` raised, if no receiver failed.
    """
    urls = [receiver.url for receiver in orders.command.receivers]
    pool = ThreadPoolExecutor(len(urls))
    token = orders.command.token
    calls = {
        url: pool.submit(_post, url + orders.path, token, body) for url, body in zip(urls, orders.bodies, strict=True)
    }
    pool.shutdown(wait=False)
    error = _run(own_part, calls, watch) if own_part is not None else None
    if error is None:
        wait(calls.values(), return_when="ALL_COMPLETED" if abort is None else FIRST_EXCEPTION)
    if abort is not None and (error or any(not call.done() or call.exception() for call in calls.values())):
        abort()
    wait(calls.values(), grace_seconds)
    return _failed(calls, error)


def _run(own_part: Callable[[], None], calls: Calls, watch: Watch | None) -> Exception | None:
    """Run `own_part`, checked by `watch`; returns what it raised."""
    ended = threading.Event()
    if watch is not None:
        threading.Thread(target=_check_end, args=(watch, calls, ended), daemon=True).start()
    try:
        own_part()
    except Exception as error:
        clear_frames(error.__traceback__)  # releases a group that was aborted
        return error
    finally:
        ended.set()
    return None


def _check_end(watch: Watch, calls: Calls, ended: threading.Event) -> None:
    wait(calls.values(), return_when=FIRST_EXCEPTION)
    if _errors(calls) and not ended.wait(watch.seconds):
        errors = _errors(calls)
        watch.stuck(_refusal(errors) or Unanswered("; ".join(f"{url}: {error}" for url, error in errors.items())))


def _refusal(errors: dict[str, BaseException]) -> WeightTransferRejected | None:
    """The first refusal, if all errors are refusals: next to another failure it may be a consequence of that."""
    refusals = [error for error in errors.values() if isinstance(error, WeightTransferRejected)]
    return refusals[0] if refusals and len(refusals) == len(errors) else None


def _errors(calls: Calls) -> dict[str, BaseException]:
    """The errors of the receivers that have failed."""
    return {url: error for url, call in calls.items() if call.done() and (error := call.exception())}


def _failed(calls: Calls, own_error: Exception | None) -> Gone:
    """The receivers that failed. If one did, others' silence and an error of the trainer may be consequences."""
    errors = _errors(calls)
    silent = {url: Unanswered("no answer yet") for url, call in calls.items() if not call.done()}
    if (refusal := _refusal(errors)) is not None:
        raise refusal
    if not errors and not silent and own_error is not None:
        raise own_error
    if own_error is not None:
        log.warning("servers failed during a transfer of weights, and so did the trainer's part: %r", own_error)
    return {url: f"{url}: {error}" for url, error in (errors | silent).items()}


def _post(url: str, token: str, body: dict[str, Any]) -> None:
    try:
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError as error:
        raise Unanswered(f"no answer: {type(error).__name__}: {error}") from error
    if answer.is_server_error:
        raise Unanswered(f"answered {answer.status_code} {answer.text[:500]}")
    if answer.is_error or not answer.json().get("success", True):
        raise WeightTransferRejected(f"{url} refused the weights: {answer.status_code} {answer.text[:500]}; {REMEDY}")
