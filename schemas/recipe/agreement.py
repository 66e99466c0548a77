"""Whether a recipe's engines agree to the bit, and what training needs where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.recipe.recipe import RlhfRecipe


def bit_equal(recipe: RlhfRecipe) -> bool:
    """Whether server and trainer compute the same logprobs: the same model code, precision and order of sums.

    Logprobs that were sampled are then the policy's own, and there is nothing to correct.
    """
    inference = recipe.inference
    return (
        inference.engine == "embedded"
        and inference.deterministic
        and recipe.trainer.backend == "local"
        and recipe.model.dtype == "float32"
    )


def needs_proximal(recipe: RlhfRecipe) -> bool:
    """Whether the policy of the iteration's start is asked for its logprobs before training.

    With one minibatch the step's own forward pass is that policy (DESIGN §5).
    """
    return not bit_equal(recipe) and recipe.algorithm.minibatches > 1
