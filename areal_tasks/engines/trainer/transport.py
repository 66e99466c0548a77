"""Hands the policy's weights to SGLang servers without the store: as tensors on a shared GPU, or by NCCL.

Only the description of the tensors passes through HTTP; the servers read or receive the weights themselves. SGLang's
side of both is its `/update_weights_from_tensor` and `/update_weights_from_distributed`.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler to hand over CUDA memory

from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.snapshot import Named
from areal_tasks.engines.trainer.weights_group import HOST, lead
from schemas.errors import UserError

TIMEOUT_SECONDS: Final = 120.0


class HandOver(UserError):
    """A server did not take the weights; the message holds its reason."""


class Sender:
    """Keeps what a transport needs between versions: NCCL's process group."""

    def __init__(self, backend: str = "nccl", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.backend = backend
        self.timeout = timedelta(seconds=timeout_seconds)
        self.group: dist.ProcessGroup | None = None
        self.name = ""
        self.members: tuple[Receiver, ...] = ()

    def send(self, tensors: Named, command: Send) -> None:
        """Give `tensors` to every receiver as weights version `command.version`; returns when all hold them.

        Raises:
            HandOver: a server refused or did not answer.
        """
        if command.transport == "tensor":
            send_handles(tensors, command)
        else:
            self._broadcast(tensors, command)

    def _broadcast(self, tensors: Named, command: Send) -> None:
        group = self.group if self.members == command.receivers else None
        group, self.group = (
            group or self._meet(command),
            None,
        )  # if this fails, its members no longer agree on what comes next
        with _asking(command, "/update_weights_from_distributed", [_description(tensors, command, self.name)]):
            works = [group.broadcast(t, root=0) for t in tensors.values()]
            for work in works:
                work.wait()
        self.group = group

    def _meet(self, command: Send) -> dist.ProcessGroup:
        """Make the process group of this process (rank 0) and every rank of every receiver."""
        port = _free_port()
        self.name, self.members = f"areal-weights-{port}", command.receivers
        sizes = [r.ranks for r in command.receivers]
        common = {"master_address": HOST, "master_port": port, "world_size": 1 + sum(sizes)}
        common |= {"group_name": self.name, "backend": self.backend}
        bodies = [{**common, "rank_offset": 1 + sum(sizes[:i])} for i in range(len(sizes))]
        with _asking(command, "/init_weights_update_group", bodies):
            return lead(self.name, port, 1 + sum(sizes), self.backend, self.timeout)


def send_handles(tensors: Named, command: Send) -> None:
    """Let the receivers map `tensors`, which lie on the GPU they share with this process, and copy them."""
    torch.cuda.synchronize()  # other processes do not wait for this one's streams
    handles = base64.b64encode(bytes(ForkingPickler.dumps(list(tensors.items())))).decode()
    bodies = [_update(command, serialized_named_tensors=[handles] * r.ranks) for r in command.receivers]
    with _asking(command, "/update_weights_from_tensor", bodies):
        pass
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _description(tensors: Named, command: Send, group: str) -> dict[str, Any]:
    """What is broadcast, and in which order."""
    return _update(
        command,
        names=list(tensors),
        dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        shapes=[list(t.shape) for t in tensors.values()],
        group_name=group,
    )


def _update(command: Send, **fields: Any) -> dict[str, Any]:
    return {**fields, "weight_version": str(command.version), "flush_cache": True}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _asking(command: Send, path: str, bodies: Sequence[dict[str, Any]]) -> Iterator[None]:
    """POST a body to every receiver (one body: the same to all) and meanwhile do what they wait for.

    Leaving waits for the answers and raises the first error among them.
    """
    urls = [r.url + path for r in command.receivers]
    each = list(bodies) * len(urls) if len(bodies) == 1 else bodies
    with ThreadPoolExecutor(len(urls)) as pool:
        calls = [pool.submit(_post, url, command.token, body) for url, body in zip(urls, each, strict=True)]
        try:
            yield
        finally:  # a refusal explains why nobody came to meet this process
            for call in calls:
                call.result()


def _post(url: str, token: str, body: dict[str, Any]) -> None:
    try:
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError as error:
        raise HandOver(f"{url} did not answer: {type(error).__name__}: {error}") from error
    if answer.is_error or not answer.json().get("success", True):
        raise HandOver(f"{url} refused the weights: {answer.status_code} {answer.text[:500]}")
