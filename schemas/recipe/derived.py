"""What follows from several fields of a recipe together.

How near server and trainer are to each other, and what training needs where they are not; what new weights do to the
requests that inference servers have under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from schemas.recipe.recipe import Recipe, RlhfRecipe


#: What new weights do to the requests that inference servers have under way.
Interruption = Literal["in_place", "abort", "drain"]


def same_code_on_cpu(recipe: RlhfRecipe) -> bool:
    """Whether server and trainer run the same model code in float32 on the CPU.

    Either then repeats itself bitwise, given as many threads. Their logprobs of a token are not bitwise identical: the
    server computes a position at a time, and a pass over whole samples sums in another order. They differ by float32
    rounding: measured, 1.2e-7 nats on average with the quickstart's 0.4 M parameters (231 of 478 tokens bitwise
    identical) and 9e-6 with 135 M (1 of 365), whatever the threads, the layout and the size of the passes. So the
    server's logprobs are taken for the policy's own, and there is nothing to correct.
    """
    inference, trainer = recipe.inference, recipe.trainer
    return (
        inference.engine == "embedded"
        and inference.deterministic
        and trainer.backend == "local"
        and not trainer.gpus
        and recipe.model.dtype == "float32"
    )


def same_policy(recipe: RlhfRecipe) -> bool:
    """Whether every token is sampled by the policy that the iteration begins with, to within float32 rounding."""
    return same_code_on_cpu(recipe) and recipe.rollout.max_head_offpolicyness == 0


def is_decoupled(recipe: RlhfRecipe) -> bool:
    """Whether the policy of the iteration's start (proximal) is told from the one that has sampled (behaviour)."""
    return recipe.algorithm.decoupled and not same_policy(recipe)


def needs_proximal(recipe: RlhfRecipe) -> bool:
    """Whether the policy of the iteration's start is asked for its logprobs before training.

    With one minibatch the step's own forward pass is that policy, token by token: the weight of a sequence
    must be known before the loss of its first token.
    """
    algorithm = recipe.algorithm
    return is_decoupled(recipe) and (algorithm.minibatches > 1 or algorithm.behaviour_level == "sequence")


def interruption(recipe: Recipe) -> Interruption | None:
    """What the recipe has new weights do, in place by default; none where nothing is under way: η is 0."""
    if recipe.flow != "rlhf" or recipe.rollout.max_head_offpolicyness == 0:
        return None
    return recipe.rollout.interruption or "in_place"
