"""rollout: the iteration's prompts, and `group_size` completions of each, sampled by the inference servers."""

from __future__ import annotations

from areal_tasks.rewards.load import verifier_version
from areal_tasks.rollout.prompts import PROMPT_COLUMNS
from areal_tasks.stages.context import Context
from areal_tasks.stages.generation import ENGINE_FIELDS
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe


def rollout(recipe: RlhfRecipe) -> Stage:
    """One row per completion: its tokens, their log-probabilities and the weights version of each.

    With filters, verdicts determine which groups there are, so they are written too, and the key covers their settings.
    """
    filtered = recipe.rollout.filters.active
    return Stage(
        name="rollout",
        kind=Kind.GENERATE,
        version=1 + (100 * verifier_version(recipe.reward.verifier) if filtered else 0),
        run=run,
        reads=columns("prompts", *PROMPT_COLUMNS),
        writes=("rollout", "judged") if filtered else ("rollout",),
        fields=("rollout", "workflow", *ENGINE_FIELDS, *(("reward",) if filtered else ())),
        carries=() if recipe.rollout.max_head_offpolicyness else ("weights",),  # else samples have several versions
        source=True,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    assert context.generation is not None, "the loop makes it"
    return context.generation.take(context, inputs, prefix)
