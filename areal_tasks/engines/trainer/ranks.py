"""The processes of a `Group`: which process starts the others, the device of each, and how all end when one does.

Rank 0, which the supervisor started, starts the other ranks of its machine in its process group, with the environment
that torchrun would give them. They hold the read end of a pipe whose write end only rank 0 has, so they end with it
however it ends; it ends, with its whole process group, as soon as one of them does. Their collectives use gloo between
CPUs; NCCL between GPUs, with gloo for tensors on the host.

A trainer on several machines (`trainer.nodes`) is a service on each, whose first rank starts the others there. They
find rank 0 by its record in the store. The supervisor ends all of these services when one has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.ports import HOST, family, group_interface
from areal_tasks.engines.service import ServiceSpec, await_meeting, register_meeting
from areal_tasks.engines.trainer.group import Group, GroupBroken
from areal_tasks.secret import handed_over, without_secrets
from schemas.errors import UserError
from schemas.recipe.training import Trainer

T = TypeVar("T")
log = logging.getLogger(__name__)

#: The variable of those that rank 0 starts. torchrun's may also be those of the job that started the flow.
STARTED: Final = "AREAL_LOCAL_RANK"
#: Time between a rank's failure and the end of the group, in which rank 0 can answer with the reason.
ANSWER_SECONDS: Final = 1.0
MEETING: Final = "{}-meeting"  # under this name the first machine of a trainer registers the group's store


@dataclass(frozen=True)
class Place:
    """This process's rank, in torchrun's terms."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    spawned: bool  # by the first rank of its machine


def environment(place: Place, host: str, port: int) -> dict[str, str]:
    """What torchrun gives to a rank whose group has its key-value store at this address, and STARTED."""
    names = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world, "MASTER_PORT": port}
    names |= {"LOCAL_WORLD_SIZE": place.local_world, STARTED: place.local_rank}
    return {"MASTER_ADDR": host, **{name: str(number) for name, number in names.items()}}


def find_place(settings: Trainer, given: Mapping[str, str], node: int = 0) -> Place:
    """This process's place on machine number `node` of a trainer of `settings.ranks` ranks."""
    here, local_rank = settings.ranks // settings.nodes, int(given.get(STARTED, 0))
    return Place(node * here + local_rank, local_rank, settings.ranks, here, STARTED in given)


def cpu_threads(settings: Trainer) -> int:
    return settings.threads or max(1, (os.cpu_count() or 1) * settings.nodes // settings.ranks)


def join(spec: ServiceSpec, settings: Trainer) -> Group:
    """Make this process a rank of its trainer, start the others unless they are started elsewhere, and join them."""
    use_interface(spec.address)
    place = find_place(settings, os.environ, spec.node)
    if place.world == 1:
        return Group()
    device = rank_device(place.local_rank, place.local_world)
    store = _open_store(place, spec)
    group = Group(place.rank, place.world, dist.PrefixStore("group", store), local_world=place.local_world)
    if not place.spawned:
        os.environ.update(environment(place, store.host, store.port))
        _start_others(place, store, cpu_threads(settings), group)
    collectives = dist.PrefixStore("collectives", store.clone())  # NCCL's threads use it while the group waits
    join_process_group(place.rank, place.world, collectives, device)
    return group


def _open_store(place: Place, spec: ServiceSpec) -> dist.TCPStore:
    """The key-value store of the group, which rank 0 serves."""
    at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if place.spawned else (spec.address, 0)
    if place.rank == 0:
        store = serve_store(*at, place.world)
        if place.local_world < place.world:
            register_meeting(spec, MEETING.format(spec.name), store.host, store.port)
        return store
    if not place.spawned:
        at = await_meeting(spec, MEETING.format(spec.name.removesuffix(f"-{spec.node}")))
    return dist.TCPStore(*at, place.world, False, wait_for_workers=False)


# ── the other ranks' processes ──────────────────────────────────────────────────────────────────────────────────────


def _start_others(place: Place, store: dist.TCPStore, threads: int, group: Group) -> None:
    read_end, _write_end = os.pipe()  # the write end is never closed: it lives as long as this process
    for local_rank in range(1, place.local_world):
        rank = place.rank + local_rank
        own_place = replace(place, rank=rank, local_rank=local_rank)
        own = environment(own_place, store.host, store.port) | {
            LIFELINE: str(read_end),
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, "-m", "areal_tasks.engines.trainer"]
        with handed_over() as (secrets, named):
            process = subprocess.Popen(
                command,
                env=without_secrets(os.environ) | own | named,
                stdin=subprocess.DEVNULL,
                pass_fds=[read_end, secrets],
            )
        threading.Thread(target=_end_with, args=(process, rank, group), name=f"rank-{rank}", daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], rank: int, group: Group) -> None:
    """Wait for the end of a rank's process, then end all."""
    code = process.wait()
    failure = group.failure_of(rank)
    log.error("rank %d ended with %d; ending the whole trainer. %s", rank, code, failure.error if failure else "")
    if failure is not None:
        end_group(group, GroupBroken(failure.error, failure.harmless))
    elif code > 0:
        os._exit(code)  # as the rank did, which has logged why; the others end by their lifelines
    else:
        os.killpg(0, signal.SIGKILL)


def end_group(group: Group, reason: Exception) -> None:
    """Let rank 0 answer with `reason`, then kill every process of the group, this one included."""
    with suppress(InvalidStateError):  # another rank has already set its reason
        group.broken.set_result(reason)
    time.sleep(ANSWER_SECONDS)
    os.killpg(0, signal.SIGKILL)


# ── process groups ──────────────────────────────────────────────────────────────────────────────────────────────────


#: A collective that waits longer waits for a rank that hangs.
TIMEOUT: Final = timedelta(minutes=30)

#: The device whose name prefixes a backend's keys in torch's store: the first that the backend supports.
DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}


def rank_device(local_rank: int, world: int) -> torch.device:
    """The GPU of a rank, among those that this process may see; the CPU where there is none. UserError if too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < world:
        raise UserError(
            f"trainer.ranks: {world} ranks need a GPU each, but {torch.cuda.device_count()} can be seen here; "
            "lower trainer.ranks or change trainer.gpus"
        )
    return torch.device("cuda", local_rank)


def join_process_group(rank: int, world: int, store: dist.Store, device: torch.device) -> None:
    """Make this process rank `rank` of `world`; returns when all have joined."""
    use_interface()
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


def use_interface(address: str = HOST) -> None:
    """Keep the sockets of this process's groups on one interface, unless the environment names another."""
    for name, interface in group_interface(address).items():
        os.environ.setdefault(name, interface)


def serve_store(host: str, port: int, size: int, timeout: timedelta = TIMEOUT) -> dist.TCPStore:
    """A key-value store for `size` processes that listens on `host` only, on a free port if `port` is 0.

    torch would listen on every interface, whatever host it is given, and the store has no authentication.
    """
    listener = socket.create_server((host, port), family=family(host))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def ranks_here() -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and its device. Without a process group, it makes one of its own."""
    if not dist.is_initialized():
        join_process_group(0, 1, dist.HashStore(), rank_device(0, 1))
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return rank, world, rank_device(local_rank, local_world)


def gather(mine: T) -> list[T]:
    """An object of each rank, in order, of any size: the ranks' key-value store takes no value above 8 MiB."""
    if not dist.is_initialized():
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def lead(name: str, at: tuple[str, int], size: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Form the group `name` of `size` processes, as its rank 0, which serves the store where the others join, `at`.

    Weights are broadcast over it, from the trainer to every rank of its inference servers. Servers are other programs,
    which join as SGLang's `init_custom_process_group` does. torch has no public call that leads such a group:
    `new_group` and the helper below it derive a new NCCL communicator from the default group's (ncclCommSplit) if that
    is bound to a GPU, as the trainer's is; servers, which are not in it, would wait forever. So this makes the group
    independently of the default one, under the store keys that the servers expect.

    Over gloo this returns when all have joined; over NCCL they connect at the first broadcast.
    """
    device = DEVICES[backend]
    use_interface(at[0])
    store = serve_store(*at, size, timeout)
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
