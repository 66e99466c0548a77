"""Digests of the settings that groups and verdicts are made with: rows with another digest are made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_tasks.code_digests import code_values
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


def made_with(recipe: RlhfRecipe, prompts: str, code: Mapping[str, str]) -> str:
    """Digest of what determines a group's content, except the weights.

    `prompts`: digest of that table; `code`: digests of the users' code.

    If groups are judged, it covers what determines their verdicts and rejections, too.
    """
    judges = judges_groups(recipe, recipe.rollout)
    judged = [_values(recipe, ["rollout.filters"], code), judged_with(recipe, code)] if judges else []
    return digest_json([_values(recipe, GROUP_FIELDS, code), recipe.seed, prompts, *judged])


def judged_with(recipe: RlhfRecipe | EvaluateRecipe, code: Mapping[str, str]) -> str:
    """Digest of the settings that a verdict depends on, and of the verifier's version or code."""
    return digest_json([_values(recipe, ["reward"], code), verifier_version(recipe.reward.verifier)])


def _values(recipe: RlhfRecipe | EvaluateRecipe, fields: Sequence[str], code: Mapping[str, str]) -> dict[str, Any]:
    return recipe_values(recipe, fields) | code_values(code, fields)
