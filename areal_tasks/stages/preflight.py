"""What can be known to fail before a run exists and before any service starts: the code that a recipe names."""

from __future__ import annotations

from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.workflows import load_workflow
from schemas.errors import UserError
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe


def check_engines(recipe: Recipe) -> None:
    """Raise UserError if the recipe asks for an engine that this version does not have yet."""
    if not isinstance(recipe, SftRecipe) and recipe.inference.engine != "embedded":
        raise UserError(f"inference.engine: {recipe.inference.engine} is not built yet; use embedded")
    if not isinstance(recipe, EvaluateRecipe) and recipe.trainer.backend != "local":
        raise UserError(f"trainer.backend: {recipe.trainer.backend} is not built yet; use local")


def check_code(recipe: Recipe) -> None:
    """Load the recipe's workflow, and its verifier in a process that can be killed.

    Raises:
        UserError: one of them does not exist, cannot be imported or does not take its arguments.
    """
    if isinstance(recipe, SftRecipe):
        return
    load_workflow(recipe.workflow.name, recipe.workflow.arguments)
    with VerifierPool(recipe.reward.model_copy(update={"workers": 1})):
        pass
