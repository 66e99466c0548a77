"""What can be known to fail before a run exists and before any service starts: the code that a recipe names."""

from __future__ import annotations

from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.workflows import load_workflow
from schemas.recipe.recipe import Recipe, SftRecipe


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
