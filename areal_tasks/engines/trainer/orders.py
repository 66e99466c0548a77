"""What a trainer asks of all its inference servers at once while it does its own part, and what came of it."""

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
REMEDY: Final = "its log says more; with inference.transport=store the weights take another way"

Gone = dict[str, str]  # why a server did not do what it was asked to, by its address
Calls = dict[str, Future[None]]  # by the address


class WeightTransferRejected(UserError):
    """A server refused the weights; the message holds its reason."""


class Unanswered(Exception):
    """A server died, hangs, or failed by itself: nobody's mistake."""


def end_stuck(group: Group, error: Exception) -> None:
    """End this trainer, which waits for a server that failed, and which nothing can call back.

    It answers with a refusal before: to start it again would bring the same. Of a server that died, or failed by
    itself, nobody is told: whoever waits for the trainer has what ended started again, and gives the command anew.
    """
    log.critical("waiting for a server that failed (%s) cannot be ended; the trainer ends", error)
    sys.stderr.flush()
    if isinstance(error, WeightTransferRejected):
        end_group(group, error)
    else:
        os._exit(1)


@dataclass(frozen=True)
class Watch:
    """What is done when this end has not ended so many `seconds` after another one failed."""

    stuck: Callable[[Exception], None]  # is told how the other one failed: a WeightTransferRejected if it refused
    seconds: float = 20.0


@dataclass(frozen=True)
class Orders:
    """One POST to every receiver of `command`, a body for each."""

    command: Send
    path: str
    bodies: Sequence[dict[str, Any]]


def together(
    orders: Orders,
    mine: Callable[[], None] | None = None,
    give_up: Callable[[], None] | None = None,
    grace_seconds: float = TIMEOUT_SECONDS,
    over: Watch | None = None,
) -> Gone:
    """Give the orders, do `mine` beside them, and wait for the answers; the receivers that failed.

    Where they do something with each other, one's failure is everybody's: `give_up` says that nobody need go on, and
    those that have not answered `grace_seconds` later count as failed, too. `over` watches that `mine` ends after a
    failure: NCCL waits for a member that failed before the group had met, and nothing can call it back.

    Raises:
        WeightTransferRejected: a receiver refused, and none failed; the others may be at it still.
        Exception: what `mine` raised, where all receivers did what they were asked to.
    """
    urls = [receiver.url for receiver in orders.command.receivers]
    pool = ThreadPoolExecutor(len(urls))
    token = orders.command.token
    calls = {
        url: pool.submit(_post, url + orders.path, token, body) for url, body in zip(urls, orders.bodies, strict=True)
    }
    pool.shutdown(wait=False)
    error = _beside(calls, mine, over) if mine is not None else None
    if error is None:
        wait(calls.values(), return_when="ALL_COMPLETED" if give_up is None else FIRST_EXCEPTION)
    if give_up is not None and (error or any(not call.done() or call.exception() for call in calls.values())):
        give_up()
    wait(calls.values(), grace_seconds)
    return _gone(calls, error)


def _beside(calls: Calls, mine: Callable[[], None], over: Watch | None) -> Exception | None:
    """What `mine` raised, while `over` watches it."""
    ended = threading.Event()
    if over is not None:
        threading.Thread(target=_watch, args=(over, calls, ended), daemon=True).start()
    try:
        mine()
    except Exception as error:
        clear_frames(error.__traceback__)  # lets go of a group that is given up
        return error
    finally:
        ended.set()
    return None


def _watch(over: Watch, calls: Calls, ended: threading.Event) -> None:
    wait(calls.values(), return_when=FIRST_EXCEPTION)
    if _errors(calls) and not ended.wait(over.seconds):
        errors = _errors(calls)
        over.stuck(_refusal(errors) or Unanswered("; ".join(f"{url}: {error}" for url, error in errors.items())))


def _refusal(errors: dict[str, BaseException]) -> WeightTransferRejected | None:
    """The first refusal, if nobody failed otherwise: one beside a failure may be its consequence."""
    refusals = [error for error in errors.values() if isinstance(error, WeightTransferRejected)]
    return refusals[0] if refusals and len(refusals) == len(errors) else None


def _errors(calls: Calls) -> dict[str, BaseException]:
    """How receivers failed that have done so."""
    return {url: error for url, call in calls.items() if call.done() and (error := call.exception())}


def _gone(calls: Calls, mine: Exception | None) -> Gone:
    """Who failed. Beside a failure silence may be its consequence, and so may an error of our own."""
    errors = _errors(calls)
    silent = {url: Unanswered("no answer yet") for url, call in calls.items() if not call.done()}
    if (refusal := _refusal(errors)) is not None:
        raise refusal
    if not errors and not silent and mine is not None:
        raise mine
    if mine is not None:
        log.warning("servers failed while new weights were handed over, and so did this end: %r", mine)
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
