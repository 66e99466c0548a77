"""What the trainer writes to the store while the flow goes on, one thing at a time, and what has come of it.

Nobody waits for it: a commit names what has come to lie in the store since the commit before. What a trainer that died
was writing is lost, and is begun again only while the version can still be had.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Literal

from areal_tasks.engines.trainer.commands import Settle, Write
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.files import commit_weights
from areal_tasks.store.paths import checkpoint_attempt, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.manifest import FileRef, WeightsRef

log = logging.getLogger(__name__)
Kind = Literal["weights", "checkpoint"]


@dataclass(frozen=True)
class Begun:
    """Something that is being written; with its `files`, once they are there and only its manifest is missing."""

    kind: Kind
    version: int
    attempt: str
    prefix: str
    started: str
    trained: float
    files: tuple[FileRef, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that no commit names yet. `trained`: as `DurableWrites.begin` was told."""

    ref: WeightsRef
    trained: float


class DurableWrites:
    """The writes of one start of a run's flow that it does not wait for. Stages that run side by side may ask."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.begun: Begun | None = None
        self._lock = threading.RLock()
        self._in_store = 0  # version of the last weights that are
        self._weights: list[WeightsRef] = []
        self._checkpoint: Checkpoint | None = None

    @property
    def newest(self) -> int:
        """Version of the last weights that are in the store, or on their way."""
        begun = self.begun
        return begun.version if begun is not None and begun.kind == "weights" else self._in_store

    def begin(self, trainer: TrainerClient, kind: Kind, version: int, trained: float = 0.0) -> None:
        """Have `trainer`, which holds `version`, write it; waits for a copy in memory. What was begun is settled first.

        `trained` is what `take_checkpoint` is to say: seconds of training since the checkpoint before.
        """
        with self._lock:
            assert self.begun is None, "one at a time"
            attempt, started = new_attempt(), now()
            prefix = (weights_attempt if kind == "weights" else checkpoint_attempt)(self.run.name, version, attempt)
            write = trainer.publish if kind == "weights" else trainer.checkpoint
            done = write(Write(owner=self.run.owner, version=version, prefix=prefix, beside=True))
            self.begun = Begun(kind, version, attempt, prefix, started, trained, done.files)

    def settle(self, trainer: TrainerClient, wait: bool) -> WeightsRef | None:
        """Give what has been written its manifest; the weights that were, if any.

        Raises:
            UserError: it could not be written; the trainer tries again.
        """
        with self._lock:
            return self._settle(trainer, wait)

    def _settle(self, trainer: TrainerClient, wait: bool) -> WeightsRef | None:
        begun = self._looked_at(trainer, wait)
        if begun is None:
            return None
        provenance = make_provenance(self.run.owner, begun.started)
        ref = commit_weights(
            self.run.store, self.run.name, begun.version, begun.attempt, begun.kind, begun.files, provenance
        )
        self.begun = None
        if begun.kind == "checkpoint":
            self._checkpoint = Checkpoint(ref, begun.trained)
            return None
        self._weights.append(ref)
        self._in_store = ref.version
        return ref

    def take_weights(self) -> tuple[WeightsRef, ...]:
        """The weights that have come to lie in the store since this was last asked, the oldest version first."""
        found, self._weights = tuple(self._weights), []
        return found

    def take_checkpoint(self) -> Checkpoint | None:
        """The same of the newest checkpoint."""
        found, self._checkpoint = self._checkpoint, None
        return found

    def _looked_at(self, trainer: TrainerClient, wait: bool) -> Begun | None:
        """What was begun, with its files; None if there are none yet, or never will be."""
        begun = self.begun
        if begun is None or begun.files:
            return begun
        command = Settle(owner=self.run.owner, version=begun.version, prefix=begun.prefix, wait=wait)
        answer = trainer.settle(command)
        if answer.busy:
            return None
        self.begun = replace(begun, files=answer.files) if answer.files else None
        if self.begun is None:
            log.warning("the %s of version %d went with the trainer that was writing it", begun.kind, begun.version)
        return self.begun
