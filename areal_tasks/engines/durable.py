"""What the trainer writes to the store while the flow goes on, one thing at a time, and what has come of it.

Nobody waits for it: a commit names what has come to lie in the store since the commit before. What a trainer that died
was writing is lost, and is begun again only while the version can still be had.
"""

from __future__ import annotations

import logging
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
    """The writes of one start of a run's flow that it does not wait for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.begun: Begun | None = None
        self.newest = 0  # version of the last weights that are in the store, or on their way
        self._weights: list[WeightsRef] = []
        self._checkpoint: Checkpoint | None = None

    def begin(self, trainer: TrainerClient, kind: Kind, version: int, trained: float = 0.0) -> None:
        """Have `trainer`, which holds `version`, write it; waits for what is being written, and for a copy in memory.

        `trained` is what `take_checkpoint` is to say: seconds of training since the checkpoint before.

        Raises:
            UserError: what was being written could not be; the trainer tries again.
        """
        self.settle(trainer, wait=True)
        attempt, started = new_attempt(), now()
        prefix = (weights_attempt if kind == "weights" else checkpoint_attempt)(self.run.name, version, attempt)
        write = trainer.publish if kind == "weights" else trainer.checkpoint
        write(Write(owner=self.run.owner, version=version, prefix=prefix, beside=True))
        self.begun = Begun(kind, version, attempt, prefix, started, trained)
        if kind == "weights":
            self.newest = version

    def settle(self, trainer: TrainerClient, wait: bool) -> WeightsRef | None:
        """Give what has been written its manifest; None if nothing has. Raises as `begin`."""
        begun = self._looked_at(trainer, wait)
        if begun is None:
            return None
        provenance = make_provenance(self.run.owner, begun.started)
        ref = commit_weights(
            self.run.store, self.run.name, begun.version, begun.attempt, begun.kind, begun.files, provenance
        )
        self.begun = None
        if begun.kind == "weights":
            self._weights.append(ref)
        else:
            self._checkpoint = Checkpoint(ref, begun.trained)
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
            self.newest = 0 if begun.kind == "weights" else self.newest
        return self.begun
