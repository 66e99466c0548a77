"""What new weights do to the requests that inference servers have under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from schemas.recipe.recipe import Recipe

Interruption = Literal["in_place", "abort", "drain"]


def interruption(recipe: Recipe) -> Interruption | None:
    """What the recipe asks for, or what its engine can do best; none where nothing is under way: η is 0."""
    if recipe.flow != "rlhf" or recipe.rollout.max_head_offpolicyness == 0:
        return None
    best: Interruption = "abort" if recipe.inference.engine == "sglang" else "in_place"
    return recipe.rollout.interruption or best
