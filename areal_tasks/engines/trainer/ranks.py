"""The processes of a `Group`: which process starts the others, the device of each, and that all end together.

Rank 0 is the service that the supervisor started. It starts the other ranks in its own process group, with the
environment that torchrun would give them; under torchrun itself (RANK and WORLD_SIZE are set) it starts none.
The others hold the read end of a pipe whose write end only rank 0 has, so they end with rank 0 however it ends;
rank 0 ends, with everything in its process group, as soon as one of them does.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.ports import HOST
from areal_tasks.engines.service import TOKEN
from areal_tasks.engines.trainer.group import Group, GroupBroken
from areal_tasks.engines.trainer.process_group import meet, rank_device, serve_store
from schemas.errors import UserError
from schemas.recipe.sections import Trainer

log = logging.getLogger(__name__)

#: Between a rank's failure and the end of the group, so that rank 0 can answer with the reason.
ANSWER_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Place:
    """This process's rank, in torchrun's terms."""

    rank: int
    local_rank: int
    world: int
    spawned: bool  # by torchrun or by rank 0


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to rank `rank` of a group on one machine."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": HOST, **{name: str(number) for name, number in names.items()}}


def find_place(settings: Trainer, given: Mapping[str, str]) -> Place:
    """This process's place in a trainer of `settings.ranks` ranks.

    Raises:
        UserError: torchrun started another number of processes, or runs on several machines.
    """
    if not {"RANK", "WORLD_SIZE"} <= given.keys():
        return Place(0, 0, settings.ranks, spawned=False)
    world = int(given["WORLD_SIZE"])
    if world != settings.ranks:
        raise UserError(
            f"trainer.ranks: the recipe asks for {settings.ranks}, but WORLD_SIZE is {world}; make them equal"
        )
    if int(given.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UserError("trainer.ranks: all ranks of a trainer must be on one machine")
    rank = int(given["RANK"])
    return Place(rank, int(given.get("LOCAL_RANK", rank)), world, spawned=True)


def cpu_threads(settings: Trainer) -> int:
    """CPU threads of each rank."""
    return settings.threads or max(1, (os.cpu_count() or 1) // settings.ranks)


def join(settings: Trainer) -> Group:
    """Make this process a rank of its trainer, start the others unless they are started elsewhere, and join them.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    place = find_place(settings, os.environ)
    if place.world == 1:
        return Group()
    device = rank_device(place.local_rank, place.world)
    store = _open_store(place)
    group = Group(place.rank, place.world, dist.PrefixStore("group", store))
    if not place.spawned:
        os.environ.update(environment(0, place.world, store.port))
        _start_others(place.world, store.port, cpu_threads(settings), group)
    meet(place.rank, place.world, dist.PrefixStore("collectives", store), device)
    return group


def _open_store(place: Place) -> dist.TCPStore:
    """The key-value store of the group: this process serves it, or torchrun or rank 0 does."""
    master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if place.spawned else (HOST, 0)
    if master:
        return serve_store(host, port, place.world)
    return dist.TCPStore(host, port, place.world, False, wait_for_workers=False)


# ── the other ranks' processes ──────────────────────────────────────────────────────────────────────────────────────


def _start_others(world: int, port: int, threads: int, group: Group) -> None:
    read_end, _write_end = os.pipe()  # the write end is never closed: it lives as long as this process
    for rank in range(1, world):
        inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
        own = {**environment(rank, world, port), LIFELINE: str(read_end), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "areal_tasks.engines.trainer"]
        process = subprocess.Popen(command, env={**inherited, **own}, stdin=subprocess.DEVNULL, pass_fds=[read_end])
        threading.Thread(target=_end_with, args=(process, rank, group), name=f"rank-{rank}", daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], rank: int, group: Group) -> None:
    """Wait for the end of a rank's process, then end all."""
    code = process.wait()
    failure = group.failure_of(rank)
    log.error("rank %d ended with %d; ending the whole trainer. %s", rank, code, failure.error if failure else "")
    if failure is not None:
        end_group(group, GroupBroken(failure.error, failure.harmless))
    else:
        os.killpg(0, signal.SIGKILL)


def end_group(group: Group, reason: Exception) -> None:
    """Let rank 0 answer with `reason`, then kill every process of the group, this one included."""
    with suppress(InvalidStateError):  # another rank has already set its reason
        group.broken.set_result(reason)
    time.sleep(ANSWER_SECONDS)
    os.killpg(0, signal.SIGKILL)
