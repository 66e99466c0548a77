"""The GPUs of the trainer and of each inference server: pure functions of the visible GPUs and the recipe.

A GPU has the name that `CUDA_VISIBLE_DEVICES` gives it; a recipe names GPUs by their index among the visible ones, as
CUDA does. On a machine without GPUs nothing is assigned.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from areal_tasks.engines.service import part_name
from schemas.errors import UserError
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe

SMI_SECONDS = 60.0


@dataclass(frozen=True)
class Placement:
    """The GPUs of the trainer and of each server; empty if there are none to assign."""

    trainer: tuple[str, ...] = ()
    servers: tuple[tuple[str, ...], ...] = ()
    nodes: int = 1  # services over which the GPUs of each server are split

    def parts(self, server: int) -> list[tuple[str, ...]]:
        """The GPUs of each service of a server."""
        gpus = self.servers[server] if self.servers else ()
        width = len(gpus) // self.nodes
        return [gpus[node * width : (node + 1) * width] for node in range(self.nodes)]

    def shared(self, server: int) -> bool:
        """Whether the server has a GPU in common with the trainer."""
        return bool(set(self.servers[server]) & set(self.trainer)) if self.servers else False

    def trainer_rank(self, server: int) -> int | None:
        """The trainer's rank on a server's only GPU; None if the server has several, or another one."""
        gpus = self.servers[server] if self.servers else ()
        return self.trainer.index(gpus[0]) if len(gpus) == 1 and gpus[0] in self.trainer else None

    def users(self, server: int) -> int:
        """How many services use the server's most shared GPU, itself included; 1 without GPUs."""
        services = [set(self.trainer), *map(set, self.servers)]
        mine = self.servers[server] if self.servers else ()
        return max((sum(gpu in service for service in services) for gpu in mine), default=1)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use: `CUDA_VISIBLE_DEVICES` if it is set, else what `nvidia-smi -L` lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(gpu for gpu in (part.strip() for part in named.split(",")) if gpu not in ("", "-1", "NoDevFiles"))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE)) if listed.returncode == 0 else ()


def memory_used(gpus: Sequence[str]) -> int:
    """Bytes that all processes use on these GPUs; 0 if `nvidia-smi` is missing or fails."""
    found = gpu_usage(gpus)
    return found[1] if found else 0


def gpu_usage(gpus: Sequence[str]) -> tuple[float | None, int] | None:
    """Mean utilisation (0 to 1; None for parts of a GPU, MIG) and bytes in use on these GPUs; None if not known."""
    if not gpus:
        return None
    query = ["nvidia-smi", "-i", ",".join(gpus), "--query-gpu=utilization.gpu,memory.used"]
    try:
        found = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        )
        rows = [line.split(",") for line in found.stdout.splitlines()]
        computed = [int(share) / 100 for share, _ in rows if share.strip().isdecimal()]
        return sum(computed) / len(computed) if computed else None, sum(int(used) << 20 for _, used in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def place_recipe(recipe: Recipe, visible: Sequence[str], external: bool = False) -> Placement:
    """`place` for a recipe. The embedded engine uses the CPU, and `external` servers run already.

    UserError as of `place`, or for `inference.release_memory` where no server shares a GPU with the trainer.
    """
    trainer = None if isinstance(recipe, EvaluateRecipe) else recipe.trainer
    ranks, chosen = (trainer.ranks, trainer.gpus) if trainer else (0, [])
    if isinstance(recipe, SftRecipe) or recipe.inference.engine != "sglang" or external:
        return place(visible, ranks, chosen)
    asked = recipe.inference
    found = place(visible, ranks, chosen, asked.servers, asked.tensor_parallel, asked.gpus)
    found = replace(found, nodes=asked.nodes)
    if asked.release_memory and visible and not any(map(found.shared, range(asked.servers))):
        raise UserError(
            "inference.release_memory: has no effect here, since servers and trainer have GPUs of their own "
            f"({describe(found)}); leave it out, or set inference.gpus to the trainer's"
        )
    return found


def place(
    visible: Sequence[str],
    ranks: int,
    trainer_gpus: Sequence[int] = (),
    servers: int = 0,
    tensor_parallel: int = 1,
    inference_gpus: Sequence[int] = (),
) -> Placement:
    """One GPU for each trainer rank, `tensor_parallel` for each server.

    Named GPUs are used as named. Otherwise the trainer gets the first ones and the servers the next; if these are too
    few, the servers share the trainer's, too. UserError if there are too few GPUs, or a named one does not exist.
    """
    if not visible:
        _named(visible, trainer_gpus, "trainer.gpus")
        _named(visible, inference_gpus, "inference.gpus")
        return Placement(servers=((),) * servers)
    if not trainer_gpus and ranks > len(visible):
        raise UserError(
            f"trainer.ranks: {ranks} ranks need a GPU each, and {_count(visible)}; lower trainer.ranks "
            "(CUDA_VISIBLE_DEVICES says which GPUs are visible)"
        )
    trainer = _named(visible, trainer_gpus, "trainer.gpus") or tuple(visible[:ranks])
    pool = _named(visible, inference_gpus, "inference.gpus") or _pool(visible, trainer, servers * tensor_parallel)
    starts = range(0, servers * tensor_parallel, tensor_parallel)
    return Placement(trainer, tuple(pool[at : at + tensor_parallel] for at in starts))


def check_joins(before: Placement, after: Placement) -> None:
    """UserError unless services keep their GPUs, and servers that join have GPUs of their own."""
    used = {gpu for gpus in (before.trainer, *before.servers) for gpu in gpus}
    joining = after.servers[len(before.servers) :]
    staying = after.servers[: len(before.servers)]
    if (after.trainer, staying) != (before.trainer, before.servers[: len(staying)]) or used & set(chain(*joining)):
        raise UserError(
            "no GPU of this machine is free for more servers or ranks, and services keep theirs during a run "
            f"({describe(before)}); make this change at the next start of the run"
        )


def assigned(placement: Placement) -> dict[str, str]:
    """The GPUs of each service that has any: `{"trainer": "0+1", "inference-0": "2"}`."""
    services = {"trainer": placement.trainer}
    for i in range(len(placement.servers)):
        services |= {part_name(f"inference-{i}", node): gpus for node, gpus in enumerate(placement.parts(i))}
    return {name: "+".join(gpus) for name, gpus in services.items() if gpus}


def describe(placement: Placement) -> str:
    """`trainer on GPU 0, inference-0 on GPU 1`."""
    return ", ".join(f"{name} on GPU {gpus}" for name, gpus in assigned(placement).items())


def _named(visible: Sequence[str], chosen: Sequence[int], field: str) -> tuple[str, ...]:
    if chosen and not visible:
        raise UserError(f"{field}: names GPU {chosen[0]}, but none is visible; leave it out to use the CPU")
    missing = [gpu for gpu in chosen if not 0 <= gpu < len(visible)]
    if missing:
        raise UserError(f"{field}: there is no GPU {missing[0]}: {_count(visible)}, numbered from 0")
    return tuple(visible[gpu] for gpu in chosen)


def _pool(visible: Sequence[str], trainer: Sequence[str], needed: int) -> tuple[str, ...]:
    free = [gpu for gpu in visible if gpu not in trainer]
    pool = (*free, *trainer)
    if needed > len(pool):
        raise UserError(
            f"inference.servers · inference.tensor_parallel = {needed} GPUs, and {_count(visible)}; lower one of them, "
            "or let servers share a GPU by naming it more than once in inference.gpus"
        )
    return pool


def _count(visible: Sequence[str]) -> str:
    return "1 is visible" if len(visible) == 1 else f"{len(visible)} are visible"
