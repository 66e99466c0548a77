"""Hands the policy's weights to SGLang servers without the store: as tensors on a shared GPU, or by NCCL.

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
import torch.multiprocessing  # teaches ForkingPickler to hand over CUDA memory

from areal_tasks.engines.ports import HOST, loopback_port
from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.orders import TIMEOUT_SECONDS, Gone, Orders, Watch, WeightTransferRejected, together
from areal_tasks.engines.trainer.process_group import lead
from areal_tasks.engines.trainer.snapshot import Named

log = logging.getLogger(__name__)
GRACE_SECONDS: Final = 10.0  # for servers that may wait for one that is gone


class Sender:
    """Keeps what a transport needs between versions: NCCL's process group."""

    def __init__(
        self,
        backend: str = "nccl",
        timeout_seconds: float = TIMEOUT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        over: Watch | None = None,
    ) -> None:
        self.backend = backend
        self.over = over
        self.timeout = timedelta(seconds=timeout_seconds)
        self.grace_seconds = grace_seconds
        self.group: dist.ProcessGroup | None = None
        self.name = ""
        self.members: tuple[Receiver, ...] = ()

    def send(self, tensors: Named, command: Send) -> Gone:
        """Give `tensors` to every receiver as weights version `command.version`; returns those that failed to take it.

        All others hold that version then. What is broadcast reaches all receivers or none.

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
        return together(orders, broadcast_all, self._drop, self.grace_seconds, self.over)

    def _broadcast_without(self, gone: Gone, tensors: Named, command: Send) -> Gone:
        """To those that are left: they met nobody, and over NCCL they have not even noticed yet."""
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
        return together(orders, open_group, self._drop, self.grace_seconds, self.over)

    def _leave(self, command: Send) -> None:
        """End the group of before, here and at the servers that stay: it holds memory on each of their GPUs.

        They are in it still where it has been given up here.
        """
        staying = tuple(r for r in command.receivers if r in self.members)
        if not staying:
            self._drop()
            return
        orders = Orders(
            command.model_copy(update={"receivers": staying}),
            "/destroy_weights_update_group",
            [{"group_name": self.name}] * len(staying),
        )
        try:
            reasons = [*together(orders, self._drop, self._drop, self.grace_seconds, self.over).values()]
        except WeightTransferRejected as error:
            reasons = [str(error)]
        if reasons:  # whether they can take weights is seen when they are asked to
            log.warning("the group %s was not left everywhere: %s", self.name, "; ".join(reasons))

    def _drop(self) -> None:
        """Give the group up without waiting for anybody: its members no longer agree on what comes next.

        NCCL ends its connections at once; gloo does when nothing holds the group any more.
        """
        group, self.group = self.group, None
        if group is not None:
            group.abort()


def send_handles(tensors: Named, command: Send) -> Gone:
    """Let the receivers map `tensors`, which lie on the GPU they share with this process, and copy them."""
    torch.cuda.synchronize()  # other processes do not wait for this one's streams
    handles = base64.b64encode(bytes(ForkingPickler.dumps(list(tensors.items())))).decode()
    bodies = [_update(command, serialized_named_tensors=[handles] * r.ranks) for r in command.receivers]
    gone = together(Orders(command, "/update_weights_from_tensor", bodies))
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return gone


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
    return {**fields, "weight_version": str(command.version), "flush_cache": not command.keep_cache}
