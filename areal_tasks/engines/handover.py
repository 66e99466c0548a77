"""How new weights reach the inference servers: directly from the trainer's memory, or through the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from areal_tasks.engines.fetching import Fetched, local_weights
from areal_tasks.engines.server import Target
from areal_tasks.engines.trainer.commands import Publish, Written
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.launchers.choice import on_this_machine
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.placement import server_needs, trainer_needs
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, common_folder, read_weights
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

Transport = Literal["store", "tensor", "nccl"]


def choose_transport(recipe: Recipe, placement: Placement, external: bool) -> Transport:
    """The transport that the recipe names, UserError if not possible; for `auto` the fastest without a network."""
    if not isinstance(recipe, RlhfRecipe) or recipe.inference.engine != "sglang":
        return "store"
    possible = _possible(placement, external)
    if not on_this_machine(recipe.launcher):  # NCCL only if the recipe names it, since it does not encrypt
        on_gpus = not external and trainer_needs(recipe).gpus > 0 and server_needs(recipe).gpus > 0
        possible = ["store", "nccl"] if on_gpus else ["store"]
    asked = recipe.inference.transport
    if asked == "auto":
        return possible[0]
    if asked not in possible:
        raise UserError(
            f"inference.transport: {asked} is not possible here: {_NEEDS[asked]}; possible: {', '.join(possible)}"
        )
    return asked


_NEEDS: Final = {
    "tensor": "every server must run on one of the trainer's GPUs and on no other",
    "nccl": "every server needs GPUs that neither the trainer's first rank nor another server uses",
}


def _possible(placement: Placement, external: bool) -> list[Transport]:
    """The transports that the placement allows, fastest first."""
    found: list[Transport] = []
    if placement.trainer and placement.servers and not external:
        used = [gpu for server in placement.servers for gpu in server]
        if None not in map(placement.trainer_rank, range(len(placement.servers))):
            found.append("tensor")
        if placement.trainer[0] not in used and len(set(used)) == len(used):
            found.append("nccl")
    return [*found, "store"]


def sending_ranks(transport: Transport, placement: Placement) -> tuple[int, ...]:
    """For each server the rank of the trainer whose weights it reads on their GPU; none with another transport."""
    if transport != "tensor":
        return ()
    ranks = map(placement.trainer_rank, range(len(placement.servers)))
    return tuple(rank for rank in ranks if rank is not None)


def name_of(ref: WeightsRef) -> str:
    """A name that distinguishes these weights from all others, also from another attempt at their version."""
    return ref.path or ref.digest


@dataclass(frozen=True)
class Published:
    """Weights in the store, and in how many seconds they were written."""

    ref: WeightsRef
    files: tuple[FileRef, ...]
    seconds: float


def write_weights(run: Run, trainer: TrainerClient, version: int) -> Published:
    """Have the trainer write the weights of `version`, which it holds, and commit them."""
    attempt, started, began = new_attempt(), now(), time.monotonic()
    prefix = weights_attempt(run.name, version, attempt)
    files = trainer.run(Publish(owner=run.owner, version=version, prefix=prefix), Written).files
    provenance = make_provenance(run.owner, started)
    ref = commit_weights(run.store, run.name, version, attempt, "weights", files, provenance)
    return Published(ref, files, time.monotonic() - began)


# ── through the store ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class WeightsSource:
    """`reads_store`: whether the servers load weights from the store by themselves; else they load folders."""

    store: Store
    reads_store: bool
    fetched: Fetched = field(default_factory=Fetched)

    def target(self, ref: WeightsRef) -> Target:
        """These weights as servers can load them by themselves, from a URL or a folder, if they can."""
        if not ref.written or self.reads_store:
            return Target(ref.version, name_of(ref), self.store.uri(ref.path) if ref.written else None)
        folder = self.store.local(common_folder(read_weights(self.store, ref).files))
        return Target(ref.version, name_of(ref), str(folder) if folder else None)

    def ready(self, ref: WeightsRef) -> str:
        """A URL or folder to load committed weights from; fetches them if necessary. UserError: a file is damaged."""
        if self.reads_store:
            return self.store.uri(ref.path)
        return str(self.fetched.hold(local_weights(self.store, read_weights(self.store, ref).files)))


def read_store(recipe: Recipe, external: Sequence[str]) -> bool:
    """Whether servers of this recipe load weights from the store by themselves; `external` ones of SGLang are asked."""
    if isinstance(recipe, SftRecipe):
        return False
    return recipe.inference.engine == "embedded" or not (external or on_this_machine(recipe.launcher))
