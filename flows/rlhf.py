"""The flow `rlhf`: rollout → verify → advantage → train → publish, per iteration."""

from __future__ import annotations

from typing import Any

from prefect import flow

from areal_tasks.stages.preflight import check_inputs
from areal_tasks.store.fork import Origin
from flows.ending import Reporting
from flows.execute import execute, prepare, run_name, with_restarts
from flows.sft import sft
from schemas.recipe.load import sft_run_name, warm_start
from schemas.recipe.recipe import RlhfRecipe


@flow(name="rlhf", flow_run_name=run_name, validate_parameters=True)
def rlhf(recipe: RlhfRecipe, run: str = "", overrides: str = "", fork: str = "") -> dict[str, Any]:
    """Reinforcement learning from verified rewards.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run. The name of an existing run resumes it. Empty: recipe name and a random one.
        overrides: Fields to change, as `section.field=value` separated by blanks, such as `schedule.iterations=50`.
        fork: A run and an iteration, `NAME@40`: share its history before that iteration, and continue from there.
    """
    with Reporting() as report:
        recipe, name, origin = prepare(recipe, run, overrides, fork)
        if recipe.model.warm_start:
            recipe = warm_started(recipe, name, origin)
        return report(execute(recipe, name, origin))


def warm_started(recipe: RlhfRecipe, name: str, origin: Origin | None = None) -> RlhfRecipe:
    """Run the recipe's SFT recipe; the recipe with the last weights of that run. A fork has its parent's: unchanged."""
    first, warm = warm_start(recipe, name)
    if with_restarts(lambda _: check_inputs(recipe, name, origin)).stored.origin:  # checks both runs, before the first
        return recipe
    sft(first, run=sft_run_name(name))
    return warm
