"""`model.warm_start`: the two runs that such a recipe stands for."""

from __future__ import annotations

from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe, SftRecipe


def first_name(name: str) -> str:
    """The name of the SFT run whose last weights the run `name` begins with."""
    return f"{name}-sft"


def warm_start(recipe: RlhfRecipe, name: str) -> tuple[SftRecipe, RlhfRecipe]:
    """The recipe of the SFT run that comes first, in the same store, and `recipe` with its last weights.

    Raises:
        UserError: there is no such recipe, or it is for another flow.
    """
    first = load_recipe(recipe.model.warm_start)
    if not isinstance(first, SftRecipe):
        raise UserError(f"model.warm_start: {recipe.model.warm_start!r} is a recipe for {first.flow}; name one for sft")
    model = recipe.model.model_copy(update={"path": f"run://{first_name(name)}", "warm_start": ""})
    here = {"store": recipe.store, "launcher": recipe.launcher}
    return first.model_copy(update=here), recipe.model_copy(update={"model": model})
