"""Properties derived from several fields of a recipe.

How closely server and trainer agree, and what training needs if they do not; what new weights do to requests in flight;
whether groups are verified as they finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe
    from schemas.recipe.sections import Rollout


#: What new weights do to requests in flight on the inference servers.
Interruption = Literal["in_place", "abort", "drain"]


def same_code_on_cpu(recipe: RlhfRecipe) -> bool:
    """Whether server and trainer run the same model code in float32 on the CPU.

    Each is then bitwise reproducible with the same number of threads. Their logprobs of a token are not bitwise
    identical: the server computes one position at a time, while a pass over whole samples sums in another order. They
    differ by float32 rounding: measured, 1.2e-7 nats on average with the quickstart's 0.4 M parameters (231 of 478
    tokens bitwise identical) and 9e-6 with 135 M (1 of 365), for any threads, layout and pass size. So the server's
    logprobs are used as the policy's own, without a correction.
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
    """Whether the policy of the iteration's start (proximal) is distinguished from the sampling one (behaviour)."""
    return recipe.algorithm.decoupled and not same_policy(recipe)


def needs_proximal(recipe: RlhfRecipe) -> bool:
    """Whether the proximal policy's logprobs are computed before training.

    With one minibatch the step's own forward pass gives them per token; but the weight of a whole sequence must be
    known before the loss of its first token.
    """
    algorithm = recipe.algorithm
    return is_decoupled(recipe) and (algorithm.minibatches > 1 or algorithm.tis_level == "sequence")


def judges_groups(recipe: RlhfRecipe | EvaluateRecipe, rollout: Rollout) -> bool:
    """Whether verdicts decide what a rollout contains: filters need rewards, or the workflow asks for verdicts."""
    return recipe.workflow.verifies or rollout.filters.active


def judges_in_advance(recipe: RlhfRecipe) -> bool:
    """Whether rollout workers verify groups as they finish although verdicts decide nothing: `verify` takes them over.

    With η = 0 that would take CPU from the generation that is waited for. It needs a CPU for each verifier of a rollout
    worker; `local` and `inline` set no limit, as verifiers use the flow's machine there in any case.
    """
    launcher = recipe.launcher
    has_cpus = launcher.type in ("local", "inline") or launcher.resources.rollout.cpus >= recipe.reward.workers
    return has_cpus and recipe.rollout.max_head_offpolicyness > 0


def interruption(recipe: Recipe) -> Interruption | None:
    """The recipe's interruption, by default in place; None if η is 0, since no request is then in flight."""
    if recipe.flow != "rlhf" or recipe.rollout.max_head_offpolicyness == 0:
        return None
    return recipe.rollout.interruption or "in_place"
