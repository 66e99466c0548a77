"""What can be known to fail before a run exists and before any service starts: the code that a recipe names."""

from __future__ import annotations

from importlib.util import find_spec

from areal_tasks.engines.external import external_servers
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.workflows import load_workflow
from schemas.errors import UserError
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe


def check_engines(recipe: Recipe) -> None:
    """Raise UserError if the recipe asks for an engine that is not installed here."""
    if not isinstance(recipe, SftRecipe) and recipe.inference.engine == "sglang" and not external_servers():
        require_package("sglang", "inference.engine")
    if not isinstance(recipe, EvaluateRecipe) and recipe.trainer.backend == "deepspeed":
        require_package("deepspeed", "trainer.backend")


def require_package(package: str, field: str) -> None:
    """Raise UserError with the install command if an optional `package` is not there; does not import it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        raise UserError(f"{field}: {package} is not installed here; run: pip install 'arealflow[{package}]'")


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
