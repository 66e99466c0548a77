"""How new weights reach the inference servers: directly from the trainer's memory, or through the store."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final, Literal

from areal_tasks.engines.trainer.commands import Publish, Written
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.launchers.gpus import Placement
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, common_folder, materialise, read_weights
from areal_tasks.store.parallel import beside
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe

Transport = Literal["store", "tensor", "nccl"]
MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "arealflow-weights-"  # of folders in memory
YOUNG_SECONDS: Final = 60.0  # a folder exists for a moment before it is locked


def choose_transport(recipe: Recipe, placement: Placement, external: bool) -> Transport:
    """The transport that the recipe names, or for `auto` the fastest that the placement allows.

    Raises:
        UserError: the placement does not allow the one it names.
    """
    if not isinstance(recipe, RlhfRecipe) or recipe.inference.engine != "sglang":
        return "store"
    possible = _possible(placement, external)
    asked = recipe.inference.transport
    if asked == "auto":
        return possible[0]
    if asked not in possible:
        raise UserError(
            f"inference.transport: {asked} is not possible here: {_NEEDS[asked]}; possible: {', '.join(possible)}"
        )
    return asked


_NEEDS: Final = {
    "tensor": "every server must run on the trainer's first GPU and on no other",
    "nccl": "every server needs GPUs that neither the trainer's first rank nor another server uses",
}


def _possible(placement: Placement, external: bool) -> list[Transport]:
    """The transports that the placement allows, fastest first."""
    found: list[Transport] = []
    if placement.trainer and placement.servers and not external:
        first = placement.trainer[0]
        used = [gpu for server in placement.servers for gpu in server]
        if set(used) == {first} and len(used) == len(placement.servers):
            found.append("tensor")
        elif first not in used and len(set(used)) == len(used):
            found.append("nccl")
    return [*found, "store"]


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


class Fetched:
    """Weights fetched from a remote store into memory: the last, which an evicted server may load later, and others.

    A server may still be loading older ones when newer ones exist: SGLang crashes if they are removed.
    """

    def __init__(self) -> None:
        self._before, self._last = ExitStack(), ExitStack()

    @contextmanager
    def local(self, store: Store, ref: WeightsRef) -> Iterator[Path]:
        """The files of `ref` in a folder of this machine, for servers to load.

        Those of a store on this machine are hashed while the servers load them, which takes as long.

        Raises:
            UserError: a file is damaged; possibly raised only on leaving, after servers have loaded it.
        """
        files = read_weights(store, ref).files
        folder = store.local(common_folder(files))
        self.outdate()
        parent = MEMORY if MEMORY.is_dir() else Path(gettempdir())
        into = folder or self._last.enter_context(memory_folder(parent))
        with beside(lambda: materialise(store, files, into, verify=True)) as checked:
            yield folder or checked.result()

    def outdate(self) -> None:
        """Newer weights exist, here or elsewhere: remove those before the last."""
        self._before.close()
        self._before, self._last = self._last, ExitStack()

    def close(self) -> None:
        """Remove all: no server loads them any more."""
        self._before.close()
        self._last.close()


@contextmanager
def memory_folder(parent: Path) -> Iterator[Path]:
    """An empty folder below `parent`, with a lock that ends with the process.

    Removes the folders of processes that have ended without removing them.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def is_abandoned(folder: Path) -> bool:
    """Whether no process holds the folder's lock. False for a folder of another user, which cannot be opened."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime > YOUNG_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
