"""The process groups of a trainer: gloo between CPUs; NCCL between GPUs, with gloo for tensors on the host.

Weights are broadcast over another group, of the trainer's rank 0, which `lead`s it, and every rank of its inference
servers. Servers are other programs, which join as SGLang's `init_custom_process_group` does. torch has no public call
that leads such a group: `new_group` and the helper below it derive a new NCCL communicator from the default group's
(ncclCommSplit) if that is bound to a GPU, as the trainer's is; servers, which are not in it, would wait forever. So
this module makes the group independently of the default one, under the store keys that the servers expect.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from areal_tasks.engines.ports import HOST, loopback_interface
from areal_tasks.engines.trainer.backend import TokenStats
from schemas.errors import UserError

#: A collective that waits longer waits for a rank that hangs.
TIMEOUT: Final = timedelta(minutes=30)

#: The device whose name prefixes a backend's keys in torch's store: the first that the backend supports.
DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}


def rank_device(local_rank: int, world: int) -> torch.device:
    """The GPU of a rank, among those that this process may see; the CPU where there is none.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < world:
        raise UserError(
            f"trainer.ranks: {world} ranks need a GPU each, but {torch.cuda.device_count()} can be seen here; "
            "lower trainer.ranks or change trainer.gpus"
        )
    return torch.device("cuda", local_rank)


def meet(rank: int, world: int, store: dist.Store, device: torch.device) -> None:
    """Make this process rank `rank` of `world`, all on this machine; returns when all have joined."""
    stay_on_loopback()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang does: all ranks must map memory alike
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )


def stay_on_loopback() -> None:
    """Keep the sockets of this process's groups on the loopback interface, unless the environment names another."""
    for name, interface in loopback_interface().items():
        os.environ.setdefault(name, interface)


def serve_store(host: str, port: int, size: int, timeout: timedelta = TIMEOUT) -> dist.TCPStore:
    """A key-value store for `size` processes that listens on `host` only, on a free port if `port` is 0.

    torch would listen on every interface, whatever host it is given, and the store has no authentication.
    """
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def ranks_here() -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and its device. Without a process group, it makes one of its own."""
    if not dist.is_initialized():
        meet(0, 1, dist.HashStore(), rank_device(0, 1))
    rank, world = dist.get_rank(), dist.get_world_size()
    return rank, world, rank_device(rank, world)


def gather_stats(stats: TokenStats) -> TokenStats:
    """The statistics of all ranks, in the order of ranks, on the CPU."""
    return TokenStats(_gather_columns(stats.values.cpu()), _gather_columns(stats.samples.cpu()[None])[0])


def _gather_columns(mine: Tensor) -> Tensor:
    """Matrices of equal height from all ranks, side by side."""
    if dist.get_world_size() == 1:
        return mine
    widths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(widths, torch.tensor([mine.shape[1]]))
    widest = max(int(w) for w in widths)
    padded = [mine.new_zeros(mine.shape[0], widest) for _ in widths]
    dist.all_gather(padded, torch.nn.functional.pad(mine, (0, widest - mine.shape[1])))
    return torch.cat([part[:, : int(width)] for part, width in zip(padded, widths, strict=True)], 1)


def lead(name: str, port: int, size: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Form the group `name` of `size` processes, as its rank 0, which serves the store where the others join.

    Over gloo this returns when all have joined; over NCCL they connect at the first broadcast.
    """
    device = DEVICES[backend]
    stay_on_loopback()
    store = serve_store(HOST, port, size, timeout)
    inner = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))  # init_custom_process_group's and torch's
    made = _backend(backend, dist.PrefixStore(f"{device}/", inner), size, name, timeout)
    group = dist.ProcessGroup(inner, 0, size)
    kind = c10d.Backend.backend_type_map[backend]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, made)
    group._set_group_name(name)
    return group


def _backend(backend: str, store: dist.Store, size: int, name: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return c10d.ProcessGroupGloo(store, 0, size, timeout)
    options = c10d.ProcessGroupNCCL.Options()  # `split_from` stays unset: see the top
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = []
    return c10d.ProcessGroupNCCL(store, 0, size, options)
