"""Whether a recipe's engines count as equal to the bit, and what training needs where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.recipe.recipe import RlhfRecipe


def bit_equal(recipe: RlhfRecipe) -> bool:
    """Whether server and trainer compute the same logprobs: the same model code in the same precision.

    The server's are then taken for the policy's own, and there is nothing to correct. What is left is the last bit of
    float32, where the two batch differently: 1e-7 nats on average over a quickstart, and measured all the same.
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
