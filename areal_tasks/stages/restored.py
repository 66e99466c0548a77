"""The weights in force after a restart: the committed ones, or, where re-training does not repeat them, new ones."""

from __future__ import annotations

import logging

from areal_tasks.engines.handover import write_weights
from areal_tasks.engines.recovery import stage_of
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.stages.context import Context
from schemas.manifest import IterationCommit, WeightsRef
from schemas.recipe.derived import same_code_on_cpu
from schemas.recipe.recipe import RlhfRecipe

log = logging.getLogger(__name__)


def restored_weights(context: Context) -> WeightsRef | None:
    """What the servers generate with in place of the committed weights; none where those still hold.

    On a GPU, or on several ranks, training may not repeat itself bitwise. There the trainer is restored before
    anything is generated, and what it holds is published as a new attempt of its version if it differs (DESIGN §8).
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
    log.warning("version %d was published anew as attempt %s: re-training did not repeat it", version, ref.attempt)
    return ref
