"""What new weights do to the requests that inference servers have under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from schemas.recipe.recipe import Recipe

Interruption = Literal["in_place", "abort", "drain"]


def interruption(recipe: Recipe) -> Interruption | None:
    """What the recipe asks for, in place by default; none where nothing is under way: η is 0."""
    if recipe.flow != "rlhf" or recipe.rollout.max_head_offpolicyness == 0:
        return None
    return recipe.rollout.interruption or "in_place"
