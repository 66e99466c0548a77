"""The flow `sft`: batch → train → publish."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.execute import child_recipe, execute, prepared, run_name
from schemas.recipe.recipe import SftRecipe


@flow(name="sft")
def sft(recipe: SftRecipe, run: str = "", overrides: str = "", fork: str = "") -> dict[str, Any]:
    """Supervised fine-tuning on the data set's answers.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run. The name of a run that exists resumes it. Empty: recipe and flow run name.
        overrides: Fields to change, as `section.field=value` with blanks between, such as `trainer.lr=1e-5`.
        fork: A run and an iteration, `NAME@40`: share all of its history before, and go on from there.
    """
    recipe = prepared(recipe, overrides)
    name = run_name(recipe, run)
    recipe, origin = child_recipe(recipe, name, fork)
    return execute(recipe, name, origin)
