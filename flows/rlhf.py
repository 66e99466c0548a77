"""The flow `rlhf`: rollout → verify → advantage → train → publish, iteration by iteration."""

from __future__ import annotations

from typing import Any

from prefect import flow

from areal_tasks.store.backend import open_store
from areal_tasks.store.runs import check_run
from areal_tasks.store.segments import continued
from flows.execute import child_recipe, execute, prepared, run_name
from flows.patience import patiently
from flows.sft import sft
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe, SftRecipe


@flow(name="rlhf", validate_parameters=True)
def rlhf(recipe: RlhfRecipe, run: str = "", overrides: str = "", fork: str = "") -> dict[str, Any]:
    """Reinforcement learning from verified rewards.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run. The name of a run that exists resumes it. Empty: recipe and flow run name.
        overrides: Fields to change, as `section.field=value` with blanks between, such as `schedule.iterations=50`.
        fork: A run and an iteration, `NAME@40`: share all of its history before, and go on from there.
    """
    recipe = prepared(recipe, overrides)
    name = run_name(recipe, run)
    recipe, origin = child_recipe(recipe, name, fork)
    if recipe.model.warm_start:
        recipe = warm_started(recipe, name)
    return execute(recipe, name, origin)


def warm_started(recipe: RlhfRecipe, name: str) -> RlhfRecipe:
    """The recipe with the last weights of its SFT recipe, which is run first, as its initial ones."""
    first = load_recipe(recipe.model.warm_start)
    if not isinstance(first, SftRecipe):
        raise UserError(f"model.warm_start: {recipe.model.warm_start!r} is a recipe for {first.flow}; name one for sft")
    model = recipe.model.model_copy(update={"path": f"run://{name}-sft", "warm_start": ""})
    warm = recipe.model_copy(update={"model": model})
    patiently(lambda _: check_continued(warm, name))  # before the SFT run
    sft(first.model_copy(update={"store": recipe.store, "launcher": recipe.launcher}), run=f"{name}-sft")
    return warm


def check_continued(recipe: RlhfRecipe, name: str) -> None:
    """UserError if there is a run of that name that this recipe cannot continue."""
    store = open_store(recipe.store.url)
    recipe, _ = continued(store, name, recipe)
    check_run(store, name, recipe.flow, recipe)
