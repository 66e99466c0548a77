"""The flow `rlhf`: rollout → verify → advantage → train → publish, per iteration."""

from __future__ import annotations

from typing import Any

from prefect import flow

from areal_tasks.stages.preflight import check_inputs
from flows.execute import child_recipe, execute, prepared, run_name
from flows.patience import patiently
from flows.sft import sft
from schemas.recipe.load import first_name, warm_start
from schemas.recipe.recipe import RlhfRecipe


@flow(name="rlhf", validate_parameters=True)
def rlhf(recipe: RlhfRecipe, run: str = "", overrides: str = "", fork: str = "") -> dict[str, Any]:
    """Reinforcement learning from verified rewards.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run. The name of an existing run resumes it. Empty: recipe name and flow run name.
        overrides: Fields to change, as `section.field=value` separated by blanks, such as `schedule.iterations=50`.
        fork: A run and an iteration, `NAME@40`: share its history before that iteration, and continue from there.
    """
    recipe = prepared(recipe, overrides)
    name = run_name(recipe, run)
    recipe, origin = child_recipe(recipe, name, fork)
    if recipe.model.warm_start:
        recipe = warm_started(recipe, name)
    return execute(recipe, name, origin)


def warm_started(recipe: RlhfRecipe, name: str) -> RlhfRecipe:
    """Run the recipe's SFT recipe; returns the recipe with the last weights of that run as its initial weights."""
    first, warm = warm_start(recipe, name)
    patiently(lambda _: check_inputs(recipe, name))  # of both runs, before the first
    sft(first, run=first_name(name))
    return warm
