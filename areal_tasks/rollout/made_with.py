"""Digests of the settings that groups and verdicts are made with: rows with another digest are made again."""

from __future__ import annotations

from typing import Final

from areal_tasks.rewards.load import verifier_version
from areal_tasks.store.keys import digest_json, recipe_values
from schemas.recipe.derived import judges_groups
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe

ENGINE_FIELDS: Final = (
    *("model.dtype", "model.max_length", "inference.engine", "inference.flags"),
    *("inference.deterministic", "inference.slots"),
)
#: The fields that determine a group's content, unlike the number of groups and their staleness.
GROUP_FIELDS: Final = (
    *("rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "rollout.stop"),
    *("workflow", *ENGINE_FIELDS),
)


def made_with(recipe: RlhfRecipe, prompts: str) -> str:
    """Digest of what determines a group's content, except the weights; `prompts`: digest of that table.

    If groups are judged, it covers what determines their verdicts and rejections, too.
    """
    judges = judges_groups(recipe, recipe.rollout)
    judged = [recipe_values(recipe, ["rollout.filters"]), judged_with(recipe)] if judges else []
    return digest_json([recipe_values(recipe, GROUP_FIELDS), recipe.seed, prompts, *judged])


def judged_with(recipe: RlhfRecipe | EvaluateRecipe) -> str:
    """Digest of the settings that a verdict depends on, and of the verifier's version."""
    return digest_json([recipe_values(recipe, ["reward"]), verifier_version(recipe.reward.verifier)])
