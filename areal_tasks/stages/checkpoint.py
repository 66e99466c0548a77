"""Checkpoints, as rare as possible such that retraining after one takes no longer than the recipe allows.

After a restart the servers get the committed weights, or new ones if retraining does not reproduce these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from areal_tasks.engines.handover import write_weights
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.trainer.commands import Checkpoint, Written
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


def next_checkpoint(context: Context, built: Mapping[str, Built], needed: bool) -> tuple[WeightsRef | None, float]:
    """The newest checkpoint after this iteration, written now if it is due or `needed`; seconds of training since."""
    held, since = (context.previous.checkpoint, since_checkpoint(context.previous)) if context.previous else (None, 0.0)
    recipe = context.recipe
    if isinstance(recipe, EvaluateRecipe):
        return held, since
    since += built["train"].manifest.metrics["train_seconds"]
    if since < recipe.trainer.recover_within_seconds and not needed:
        return held, since
    try:
        return write_checkpoint(context, built["train"].manifest), 0.0
    except (TrainerDown, StoreError) as error:  # tables suffice to retrain: the next iteration tries again
        log.warning("no checkpoint of version %d: %s", context.iteration + 1, error)
        return held, since


def since_checkpoint(commit: IterationCommit) -> float:
    """Seconds of training that a restart after `commit` would repeat."""
    return float(commit.state["train_seconds_since_checkpoint"])


def write_checkpoint(context: Context, train: StageManifest) -> WeightsRef:
    """Have the trainer write all that it needs to continue from the result of `train`; commits it."""
    run, version, attempt, started = context.run, train.iteration + 1, new_attempt(), now()
    prefix = paths.checkpoint_attempt(run.name, version, attempt)
    command = Checkpoint(owner=run.owner, version=version, prefix=prefix)
    files = context.engines.actor.after(train).run(command, Written).files
    provenance = make_provenance(run.owner, started)
    return commit_weights(context.store, run.name, version, attempt, "checkpoint", files, provenance)


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
    if retrained is None or retrained.same:
        return None
    trainer = context.engines.actor.after(stage_of(context.run, head, "train"))
    ref = write_weights(context.run, trainer, version).ref
    context.engines.servers.serve(ref)
    log.warning("version %d was published again as attempt %s: retraining did not reproduce it", version, ref.attempt)
    return ref
