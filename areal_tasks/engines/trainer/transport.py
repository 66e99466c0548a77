"""Sends the policy's weights to SGLang servers without the store: as tensors on a shared GPU, or by NCCL.

Only the description of the tensors passes through HTTP; the servers read or receive the weights themselves. SGLang's
side of both is its `/update_weights_from_tensor` and `/update_weights_from_distributed`. Rank 0 sends the requests, to
all servers at once, and does its own part meanwhile. On a shared GPU a server reads the tensors of the rank there.
"""

from __future__ import annotations

import base64
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from secrets import token_hex
from traceback import clear_frames
from typing import Any, Final

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions  # makes ForkingPickler share CUDA memory

from areal_tasks.engines.access import Access
from areal_tasks.engines.ports import HOST, hold_port
from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.ranks import lead
from areal_tasks.engines.trainer.snapshot import Named
from schemas.errors import UserError

log = logging.getLogger(__name__)
TIMEOUT_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 10.0  # for servers that may be waiting for a failed one
STUCK_SECONDS: Final = 20.0  # for the trainer's own part after a server failed
#: Which argument of the function that maps shared CUDA memory is the GPU's number.
DEVICE: Final = [*inspect.signature(reductions.rebuild_cuda_tensor).parameters].index("storage_device")
REMEDY: Final = "see its log; inference.transport=store sends the weights another way"

Failures = dict[str, str]  # from the address of a server that failed to the reason
Calls = dict[str, Future[None]]  # by the address


class WeightTransferRejected(UserError):
    """A server refused the weights; the message holds its reason."""


class Unanswered(Exception):
    """A server died, hangs, or failed internally: the request is not the cause."""


@dataclass
class Sender:
    """Sends weights, and keeps NCCL's process group between versions.

    In a collective operation one failure fails all: the group is aborted, and servers that have not answered
    `grace_seconds` later count as failed too. NCCL waits for a member that failed before the group was connected, and
    cannot be interrupted: if the trainer's part has not ended `stuck_seconds` after a server failed, `stuck` is called
    with the failure, and has to end this process. The group meets at `address`, one of this machine's.
    """

    stuck: Callable[[Exception], object]
    backend: str = "nccl"
    timeout_seconds: float = TIMEOUT_SECONDS
    grace_seconds: float = GRACE_SECONDS
    stuck_seconds: float = STUCK_SECONDS
    address: str = HOST
    group: dist.ProcessGroup | None = field(default=None, init=False)
    name: str = field(default="", init=False)  # of the group
    members: tuple[Receiver, ...] = field(default=(), init=False)

    def send(self, tensors: Named, command: Send, handles: Sequence[str] = ()) -> Failures:
        """Send `tensors` to every receiver as weights version `command.version`; returns the receivers that failed.

        All others then hold it. A broadcast reaches all receivers or none. With `tensor` each server gets the `handles`
        of the rank on its GPU. WeightTransferRejected: a server refused, and none failed otherwise.
        """
        if command.transport == "nccl":
            return self._broadcast(tensors, command)
        of_each = [[handles[one.trainer_rank]] * one.ranks for one in command.receivers]
        bodies = [_update(command, serialized_named_tensors=own) for own in of_each]
        calls = post_all(command, "/update_weights_from_tensor", bodies)
        wait(calls.values())
        return failed(calls, None)

    def _broadcast(self, tensors: Named, command: Send) -> Failures:
        if self.group is None or self.members != command.receivers:
            failures = self._form_group(command)
            if failures:  # the others are in no group, which over NCCL they have not noticed yet
                left = tuple(r for r in command.receivers if r.url not in failures)
                others = command.model_copy(update={"receivers": left})
                return failures | (self._broadcast(tensors, others) if left else {})

        def broadcast_all() -> None:
            group = self.group
            assert group is not None
            for work in [group.broadcast(t, root=0) for t in tensors.values()]:
                work.wait()

        body = _update(
            command,
            names=list(tensors),
            dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            shapes=[list(t.shape) for t in tensors.values()],
            group_name=self.name,
        )
        return self.run_collective(
            command, "/update_weights_from_distributed", [body] * len(command.receivers), broadcast_all
        )

    def _form_group(self, command: Send) -> Failures:
        """Make the process group of this process (rank 0) and every rank of every receiver."""
        self._leave(command)
        with hold_port(0, self.address) as held:  # until the group's store listens there
            port = held.getsockname()[1]
            self.name = f"areal-weights-{token_hex(6)}"
            self.members = command.receivers
            sizes = [r.ranks for r in command.receivers]
            common = {"master_address": self.address, "master_port": port, "world_size": 1 + sum(sizes)}
            common |= {"group_name": self.name, "backend": self.backend}
            bodies = [{**common, "rank_offset": 1 + sum(sizes[:i])} for i in range(len(sizes))]

            def open_group() -> None:
                timeout = timedelta(seconds=self.timeout_seconds)
                self.group = lead(self.name, (self.address, port), 1 + sum(sizes), self.backend, timeout)

            return self.run_collective(command, "/init_weights_update_group", bodies, open_group)

    def _leave(self, command: Send) -> None:
        """End the previous group, also on servers that are still in it though it was aborted here: it holds memory."""
        members = tuple(r for r in (*command.receivers, *command.leaving) if r in self.members)
        if not members:
            self._abort()
            return
        bodies = [{"group_name": self.name}] * len(members)
        command = command.model_copy(update={"receivers": members})
        try:
            reasons = [*self.run_collective(command, "/destroy_weights_update_group", bodies, self._abort).values()]
        except WeightTransferRejected as error:
            reasons = [str(error)]
        if reasons:  # the next request shows whether they can take weights
            log.warning("not every server left the group %s: %s", self.name, "; ".join(reasons))

    def run_collective(
        self, command: Send, path: str, bodies: Sequence[dict[str, Any]], own_part: Callable[[], None]
    ) -> Failures:
        """POST each receiver its body, run `own_part` meanwhile, wait for the answers; returns those that failed.

        If none failed, raises WeightTransferRejected for one that refused, or what `own_part` raised.
        """
        calls = post_all(command, path, bodies)
        error = self._run(own_part, calls)
        if error is None:
            wait(calls.values(), return_when=FIRST_EXCEPTION)
        if error or any(not call.done() or call.exception() for call in calls.values()):
            self._abort()
        wait(calls.values(), self.grace_seconds)
        return failed(calls, error)

    def _run(self, own_part: Callable[[], None], calls: Calls) -> Exception | None:
        """Run `own_part`, checked by `_check_end`; returns what it raised."""
        ended = threading.Event()
        threading.Thread(target=self._check_end, args=(calls, ended), daemon=True).start()
        try:
            own_part()
        except Exception as error:
            clear_frames(error.__traceback__)  # releases a group that was aborted
            return error
        finally:
            ended.set()
        return None

    def _check_end(self, calls: Calls, ended: threading.Event) -> None:
        wait(calls.values(), return_when=FIRST_EXCEPTION)
        if _errors(calls) and not ended.wait(self.stuck_seconds):
            errors = _errors(calls)
            error = _refusal(errors) or Unanswered("; ".join(f"{url}: {error}" for url, error in errors.items()))
            log.critical("the trainer cannot stop waiting for a server that failed (%s), and ends", error)
            sys.stderr.flush()
            self.stuck(error)

    def _abort(self) -> None:
        """Abort the group without waiting for its members, which may be at different operations.

        NCCL closes its connections at once; gloo does when nothing refers to the group any more.
        """
        group, self.group = self.group, None
        if group is not None:
            group.abort()


class _Handles(ForkingPickler):
    """Pickles CUDA tensors as handles for a process that sees only the GPU that they are on, as its first."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        return rebuild, (*arguments[:DEVICE], 0, *arguments[DEVICE + 1 :])


def handles_of(tensors: Named) -> str:
    """Handles with which a server on the same GPU maps `tensors`. Waits for the work queued on them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # other processes do not wait for this one's streams
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return base64.b64encode(bytes(_Handles.dumps(list(tensors.items())))).decode()


def _update(command: Send, **fields: Any) -> dict[str, Any]:
    return {**fields, "weight_version": str(command.version), "flush_cache": not command.keep_cache}


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────


def post_all(command: Send, path: str, bodies: Sequence[dict[str, Any]]) -> Calls:
    """Begin a POST to every receiver of `command`, with one body per receiver."""
    pairs = list(zip(command.receivers, bodies, strict=True))
    pool, access = ThreadPoolExecutor(len(pairs)), Access(command.token, command.authority)
    calls = {one.url: pool.submit(_post, one.url + path, access, body) for one, body in pairs}
    pool.shutdown(wait=False)
    return calls


def _post(url: str, access: Access, body: dict[str, Any]) -> None:
    try:
        with httpx.Client(headers=access.headers, transport=access.transport(), timeout=TIMEOUT_SECONDS) as client:
            answer = client.post(url, json=body)
    except httpx.TransportError as error:
        raise Unanswered(f"no answer: {type(error).__name__}: {error}") from error
    if answer.is_server_error:
        raise Unanswered(f"answered {answer.status_code} {answer.text[:500]}")
    if answer.is_error or not answer.json().get("success", True):
        raise WeightTransferRejected(f"{url} refused the weights: {answer.status_code} {answer.text[:500]}; {REMEDY}")


def failed(calls: Calls, own_error: Exception | None) -> Failures:
    """The receivers that failed, and those without an answer. Raises a refusal, or the trainer's own error.

    If a receiver failed, silence of others and an error of the trainer may be consequences.
    """
    errors = _errors(calls)
    silent = {url: Unanswered("no answer yet") for url, call in calls.items() if not call.done()}
    if (refusal := _refusal(errors)) is not None:
        raise refusal
    if not errors and not silent and own_error is not None:
        raise own_error
    if own_error is not None:
        log.warning("servers failed during a transfer of weights, and so did the trainer's part: %r", own_error)
    return {url: f"{url}: {error}" for url, error in (errors | silent).items()}


def _errors(calls: Calls) -> dict[str, BaseException]:
    """The errors of the receivers that have failed."""
    return {url: error for url, call in calls.items() if call.done() and (error := call.exception())}


def _refusal(errors: dict[str, BaseException]) -> WeightTransferRejected | None:
    """The first refusal, if all errors are refusals: next to another failure it may be a consequence of that."""
    refusals = [error for error in errors.values() if isinstance(error, WeightTransferRejected)]
    return refusals[0] if refusals and len(refusals) == len(errors) else None
