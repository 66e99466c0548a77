"""Sends the policy's weights to SGLang servers without the store: as tensors on a shared GPU, or by NCCL.

Only the description of the tensors passes through HTTP; the servers read or receive the weights themselves. SGLang's
side of both is its `/update_weights_from_tensor` and `/update_weights_from_distributed`.
"""

from __future__ import annotations

import base64
import logging
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from secrets import token_hex
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing  # makes ForkingPickler share CUDA memory

from areal_tasks.engines.ports import HOST, loopback_port
from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.orders import TIMEOUT_SECONDS, Gone, Orders, Watch, WeightTransferRejected, post_all
from areal_tasks.engines.trainer.process_group import lead
from areal_tasks.engines.trainer.snapshot import Named

log = logging.getLogger(__name__)
GRACE_SECONDS: Final = 10.0  # for servers that may be waiting for a failed one


class Sender:
    """Sends weights, and keeps NCCL's process group between versions."""

    def __init__(
        self,
        backend: str = "nccl",
        timeout_seconds: float = TIMEOUT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        watch: Watch | None = None,
    ) -> None:
        self.backend = backend
        self.watch = watch
        self.timeout = timedelta(seconds=timeout_seconds)
        self.grace_seconds = grace_seconds
        self.group: dist.ProcessGroup | None = None
        self.name = ""
        self.members: tuple[Receiver, ...] = ()

    def send(self, tensors: Named, command: Send) -> Gone:
        """Send `tensors` to every receiver as weights version `command.version`; returns the receivers that failed.

        All others then hold that version. A broadcast reaches all receivers or none.

        Raises:
            WeightTransferRejected: a server refused, and none failed otherwise.
        """
        if command.transport == "tensor":
            return send_handles(tensors, command)
        return self._broadcast(tensors, command)

    def _broadcast(self, tensors: Named, command: Send) -> Gone:
        if self.group is None or self.members != command.receivers:
            gone = self._meet(command)
            if gone:
                return gone | self._broadcast_without(gone, tensors, command)

        def broadcast_all() -> None:
            group = self.group
            assert group is not None
            for work in [group.broadcast(t, root=0) for t in tensors.values()]:
                work.wait()

        body = _description(tensors, command, self.name)
        orders = Orders(command, "/update_weights_from_distributed", [body] * len(command.receivers))
        return post_all(orders, broadcast_all, self._abort, self.grace_seconds, self.watch)

    def _broadcast_without(self, gone: Gone, tensors: Named, command: Send) -> Gone:
        """Broadcast to the other receivers: they are in no group, which over NCCL they have not noticed yet."""
        left = tuple(r for r in command.receivers if r.url not in gone)
        return self._broadcast(tensors, command.model_copy(update={"receivers": left})) if left else {}

    def _meet(self, command: Send) -> Gone:
        """Make the process group of this process (rank 0) and every rank of every receiver."""
        self._leave(command)
        port = loopback_port()
        self.name = f"areal-weights-{token_hex(6)}"
        self.members = command.receivers
        sizes = [r.ranks for r in command.receivers]
        common = {"master_address": HOST, "master_port": port, "world_size": 1 + sum(sizes)}
        common |= {"group_name": self.name, "backend": self.backend}
        bodies = [{**common, "rank_offset": 1 + sum(sizes[:i])} for i in range(len(sizes))]

        def open_group() -> None:
            self.group = lead(self.name, port, 1 + sum(sizes), self.backend, self.timeout)

        orders = Orders(command, "/init_weights_update_group", bodies)
        return post_all(orders, open_group, self._abort, self.grace_seconds, self.watch)

    def _leave(self, command: Send) -> None:
        """End the previous group, here and on the servers that stay: it holds memory on each of their GPUs.

        Servers are still in a group that was only aborted here.
        """
        staying = tuple(r for r in command.receivers if r in self.members)
        if not staying:
            self._abort()
            return
        orders = Orders(
            command.model_copy(update={"receivers": staying}),
            "/destroy_weights_update_group",
            [{"group_name": self.name}] * len(staying),
        )
        try:
            reasons = [*post_all(orders, self._abort, self._abort, self.grace_seconds, self.watch).values()]
        except WeightTransferRejected as error:
            reasons = [str(error)]
        if reasons:  # the next request shows whether they can take weights
            log.warning("not every server left the group %s: %s", self.name, "; ".join(reasons))

    def _abort(self) -> None:
        """Abort the group without waiting for its members, which may be at different operations.

        NCCL closes its connections at once; gloo does when nothing refers to the group any more.
        """
        group, self.group = self.group, None
        if group is not None:
            group.abort()


def send_handles(tensors: Named, command: Send) -> Gone:
    """Have the receivers map and copy `tensors`, which are on the GPU that they share with this process."""
    torch.cuda.synchronize()  # other processes do not wait for this one's streams
    handles = base64.b64encode(bytes(ForkingPickler.dumps(list(tensors.items())))).decode()
    bodies = [_update(command, serialized_named_tensors=[handles] * r.ranks) for r in command.receivers]
    gone = post_all(Orders(command, "/update_weights_from_tensor", bodies))
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return gone


def _description(tensors: Named, command: Send, group: str) -> dict[str, Any]:
    """The tensors that are broadcast, in order."""
    return _update(
        command,
        names=list(tensors),
        dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        shapes=[list(t.shape) for t in tensors.values()],
        group_name=group,
    )


def _update(command: Send, **fields: Any) -> dict[str, Any]:
    return {**fields, "weight_version": str(command.version), "flush_cache": not command.keep_cache}
