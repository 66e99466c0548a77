"""Checkpoints, as rare as possible such that retraining after one takes no longer than the recipe allows.

After a restart the servers get the committed weights, or new ones if retraining does not reproduce these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from areal_tasks.engines.handover import write_weights
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.trainer.commands import Checkpoint, Done, Finish, Finished
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.engines.trainers import stage_of
from areal_tasks.stages.build import Built
from areal_tasks.stages.stage import Context
from areal_tasks.store import paths
from areal_tasks.store.backend import StoreError
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights
from areal_tasks.store.provenance import make_provenance, now
from schemas.manifest import IterationCommit, StageManifest, WeightsRef
from schemas.recipe.derived import same_code_on_cpu
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnderWay:
    """A checkpoint that the trainer is writing, begun after `since` seconds of training since the one before."""

    version: int
    attempt: str
    started: str
    since: float


class Checkpoints:
    """The checkpoints of a run, of which at most one is under way, while later iterations train."""

    def __init__(self) -> None:
        self.under_way: UnderWay | None = None

    def after(
        self, context: Context, built: Mapping[str, Built], needed: bool, last: bool
    ) -> tuple[WeightsRef | None, float]:
        """The newest checkpoint that is written after this iteration, and the seconds of training since its version.

        One that is due is begun; one of this version is waited for if it is `needed`. The `last` iteration of a run
        waits for one that is under way, or else for one that is due.
        """
        before = context.previous
        held, since = (before.checkpoint, since_checkpoint(before)) if before else (None, 0.0)
        if isinstance(context.recipe, EvaluateRecipe):
            return held, since
        train = built["train"].manifest
        if needed:
            self.under_way = None  # another takes its place
        waited = last and self.under_way is not None
        held, since = self._taken(context, held, since + train.metrics["train_seconds"], last)
        due = since >= context.recipe.trainer.recover_within_seconds and not waited
        if needed or (due and self.under_way is None):
            self._begin(context, train, since)
            if needed or last:
                held, since = self._taken(context, held, since, wait=True)
        return held, since

    def _taken(
        self, context: Context, held: WeightsRef | None, since: float, wait: bool
    ) -> tuple[WeightsRef | None, float]:
        """The checkpoint under way if it is written by now, which is then committed, else the one that was held.

        Its manifest counts once the commit of an iteration names it. A trainer that has been restarted since knows
        nothing of it.
        """
        if (made := self.under_way) is None:
            return held, since
        run, prefix = context.run, paths.checkpoint_attempt(context.run.name, made.version, made.attempt)
        command = Finish(owner=run.owner, version=made.version, prefix=prefix, wait=wait)
        try:
            files = context.engines.actor.as_it_is().run(command, Finished).files
            if files is None:
                return held, since
            provenance = make_provenance(run.owner, made.started)
            found = commit_weights(context.store, run.name, made.version, made.attempt, "checkpoint", files, provenance)
        except (TrainerDown, StoreError) as error:
            self._failed(made.version, error)
            return held, since
        self.under_way = None
        return found, max(since - made.since, 0.0)

    def _begin(self, context: Context, train: StageManifest, since: float) -> None:
        """Have the trainer copy all that it needs to continue from the result of `train`, and write the copy."""
        version, attempt = train.iteration + 1, new_attempt()
        prefix = paths.checkpoint_attempt(context.run.name, version, attempt)
        try:
            trainer = context.engines.actor.after(train)
            self.under_way = UnderWay(version, attempt, now(), since)
            trainer.run(Checkpoint(owner=context.run.owner, version=version, prefix=prefix), Done)
        except (TrainerDown, StoreError) as error:
            self._failed(version, error)

    def _failed(self, version: int, error: Exception) -> None:
        """Nothing is lost but time at a restart: tables suffice to retrain. The next iteration tries again."""
        self.under_way = None
        log.warning("no checkpoint of version %d: %s", version, error)


def since_checkpoint(commit: IterationCommit) -> float:
    """Seconds of training that a restart after `commit` would repeat."""
    return float(commit.state["train_seconds_since_checkpoint"])


def restored_weights(context: Context) -> WeightsRef | None:
    """The weights that replace the committed ones on the servers; None where the committed ones are kept.

    On a GPU, or on several ranks, training may not repeat itself bitwise. There the trainer is restored before
    anything is generated, and if its weights differ they are published as a new attempt of their version.
    Elsewhere it is restored when it is first needed.
    """
    same = not isinstance(context.recipe, RlhfRecipe) or same_code_on_cpu(context.recipe)
    if context.previous is None or same or not context.engines.servers.generates:
        return None
    for _ in range(context.recipe.launcher.restarts):
        try:
            return _restored(context, context.previous)
        except (TrainerDown, ServerDown) as error:
            log.warning("restoring version %d again: %s", context.previous.weights.version, error)
    return _restored(context, context.previous)


def _restored(context: Context, head: IterationCommit) -> WeightsRef | None:
    version = head.weights.version
    retrained = context.engines.actor.restored(version)
    if retrained is None or retrained.same_weights:
        return None
    trainer = context.engines.actor.after(stage_of(context.run, head, "train"))
    ref = write_weights(context.run, trainer, version).ref
    context.engines.servers.serve(ref)
    log.warning("version %d was published again as attempt %s: retraining did not reproduce it", version, ref.attempt)
    return ref
