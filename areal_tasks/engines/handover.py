"""How new weights reach the inference servers: through the store, or from the trainer's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from areal_tasks.engines.fetching import fetch_meanwhile
from areal_tasks.engines.memory_folder import MemoryFolder
from areal_tasks.engines.trainer.commands import Receiver, Send, Write
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.launchers.gpus import Placement
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.files import commit_weights, common_folder, digested, materialise, read_weights
from areal_tasks.store.parallel import beside
from areal_tasks.store.paths import weights, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe

Transport = Literal["store", "tensor", "nccl"]
MEMORY: Final = Path("/dev/shm")


def choose_transport(recipe: Recipe, placement: Placement, external: bool) -> Transport:
    """The transport that the recipe names, or for `auto` the fastest that the placement of services allows.

    Raises:
        UserError: the one it names is not possible there.
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
    """Fastest first."""
    found: list[Transport] = []
    if placement.trainer and placement.servers and not external:
        first = placement.trainer[0]
        used = [gpu for server in placement.servers for gpu in server]
        if set(used) == {first} and len(used) == len(placement.servers):
            found.append("tensor")
        elif first not in used and len(set(used)) == len(used):
            found.append("nccl")
    return [*found, "store"]


def send_command(owner: int, version: int, transport: Transport, urls: Sequence[str], ranks: int, token: str) -> Send:
    """The trainer's order to hand `version` to the servers at `urls`, each of `ranks` GPUs."""
    if transport == "store":
        raise ValueError("through the store nothing is sent")
    receivers = tuple(Receiver(url=url, ranks=ranks) for url in urls)
    return Send(owner=owner, version=version, transport=transport, receivers=receivers, token=token)


def name_of(ref: WeightsRef) -> str:
    """What tells these weights from others, also from another attempt at their version."""
    return ref.path or ref.digest


@dataclass(frozen=True)
class Published:
    """Weights in the store, and how long it took until servers could load them, and each server to do so."""

    ref: WeightsRef
    files: tuple[FileRef, ...]
    write_seconds: float
    load_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Draft:
    """Weights whose files lie in the store, durable, and which no manifest names yet: no reader can see them."""

    run: Run
    version: int
    attempt: str = field(default_factory=new_attempt)
    files: tuple[FileRef, ...] = ()
    memory: MemoryFolder | None = None  # with the files, if they were fetched
    started: str = field(default_factory=now)
    began: float = field(default_factory=time.monotonic)

    @property
    def prefix(self) -> str:
        """Where the files lie in the store."""
        return weights_attempt(self.run.name, self.version, self.attempt)

    @property
    def name(self) -> str:
        """The `name_of` what becomes of it."""
        return weights(self.run.name, self.version, self.attempt)

    @property
    def folder(self) -> Path | None:
        """Of this machine, with the files; none where they are elsewhere alone."""
        return Path(self.memory.name) if self.memory else self.run.store.local(self.prefix)

    def commit(self) -> Published:
        """Make the digests that the trainer did not, and the manifest, which makes the files weights."""
        run, files = self.run, digested(self.run.store, self.files)
        provenance = make_provenance(run.owner, self.started)
        ref = commit_weights(run.store, run.name, self.version, self.attempt, "weights", files, provenance)
        return Published(ref, files, time.monotonic() - self.began)


def draft_weights(run: Run, trainer: TrainerClient, version: int) -> Draft:
    """Have the trainer write the weights of `version`, which it holds, under a fresh attempt."""
    draft = Draft(run, version)
    return replace(draft, files=_write(draft, trainer))


def local_draft(run: Run, trainer: TrainerClient, version: int) -> Draft:
    """As `draft_weights`, with the files in a folder of this machine.

    From a store elsewhere they are fetched into memory while the trainer writes them. One on this machine has them
    sooner without their digests, which are made at the commit.

    Raises:
        UserError: a file cannot be fetched, or not as it was written.
    """
    draft = Draft(run, version)
    if draft.folder is not None:
        return replace(draft, files=_write(draft, trainer, digests=False))
    memory = new_memory()
    try:
        files = fetch_meanwhile(run.store, draft.prefix, Path(memory.name), lambda: _write(draft, trainer))
    except BaseException:
        memory.cleanup()
        raise
    return replace(draft, files=files, memory=memory)


def _write(draft: Draft, trainer: TrainerClient, digests: bool = True) -> tuple[FileRef, ...]:
    command = Write(owner=draft.run.owner, version=draft.version, prefix=draft.prefix, digests=digests)
    return trainer.publish(command).files


def load_ahead(draft: Draft, load: Callable[[str], list[float]]) -> Published:
    """Have servers `load` the folder of a local draft, seconds for each, and commit the draft beside it.

    Where either fails, servers may hold files that no manifest names, and say that they hold the version.
    """
    written = time.monotonic() - draft.began
    with beside(draft.commit) as committed:
        loads = load(str(draft.folder))
    return replace(committed.result(), write_seconds=written, load_seconds=loads)


def new_memory() -> MemoryFolder:
    """An empty folder in memory."""
    return MemoryFolder(MEMORY if MEMORY.is_dir() else None)


class Fetched:
    """Folders of fetched weights, in memory: the last, which a server that failed may load later, and the one before.

    Such a server may still be loading the older ones when there are newer: SGLang does not survive that they go.
    """

    def __init__(self) -> None:
        self._before, self._last = ExitStack(), ExitStack()

    def outdate(self) -> None:
        """There are newer weights, here or not: the folder before the last one goes."""
        self._before.close()
        self._before, self._last = self._last, ExitStack()

    def folder(self) -> Path:
        """An empty one, for newer weights."""
        self.outdate()
        return Path(self._last.enter_context(new_memory()))

    def keep(self, memory: MemoryFolder | None) -> None:
        """Newer weights lie there, or (None) elsewhere."""
        self.outdate()
        if memory is not None:
            self._last.enter_context(memory)

    def loaded(self, seconds: list[float], servers: int) -> list[float]:
        """Some of so many servers have loaded the last ones, each in `seconds`; who failed does when well again."""
        if len(seconds) == servers:
            self.close()
        return seconds

    def close(self) -> None:
        """Nobody loads any of them any more."""
        self._before.close()
        self._last.close()


@contextmanager
def local_weights(store: Store, ref: WeightsRef, fetched: Fetched) -> Iterator[Path]:
    """The files of `ref` in a folder of this machine, for servers to load.

    If they must be fetched, they lie in a folder of `fetched`: some server may load them later. Where they
    lie on this machine they are hashed beside the loading, which is as long.

    Raises:
        UserError: a file is damaged; perhaps only on leaving, before anybody has been told that the weights are there.
    """
    files = read_weights(store, ref).files
    there = store.local(common_folder(files))
    into = fetched.folder()
    with beside(lambda: materialise(store, files, into, verify=True)) as checked:
        yield there or checked.result()
