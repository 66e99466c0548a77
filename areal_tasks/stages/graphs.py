"""The stages of each flow, and the targets of an iteration."""

from __future__ import annotations

from areal_tasks.stages.advantage import advantage
from areal_tasks.stages.batch import batch
from areal_tasks.stages.evaluate import evaluate
from areal_tasks.stages.generation import rollout
from areal_tasks.stages.initialise import initialise
from areal_tasks.stages.planner import Plan, plan
from areal_tasks.stages.prompts import prompts
from areal_tasks.stages.publish import publish
from areal_tasks.stages.reference import proximal, reference
from areal_tasks.stages.scalars import scalars
from areal_tasks.stages.stage import Stage
from areal_tasks.stages.train import train
from areal_tasks.stages.verify import verify
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe


def stages(recipe: Recipe) -> list[Stage]:
    """Every stage of the flow of this recipe; the planner selects the needed ones."""
    common = [initialise(recipe), prompts(recipe)]
    if isinstance(recipe, EvaluateRecipe):
        return [*common, evaluate(recipe)]
    ends = [train(recipe), publish(recipe)]
    if isinstance(recipe, RlhfRecipe):
        makers = (rollout, verify, reference, proximal, advantage, evaluate, scalars)
        return [*common, *(make(recipe) for make in makers), *ends]
    return [*common, batch(recipe), *ends]


def iteration_plan(recipe: Recipe, iteration: int) -> Plan:
    """The graph of one iteration. PlanError if the stages' declarations do not form one."""
    return plan(stages(recipe), targets(recipe, iteration))


def targets(recipe: Recipe, iteration: int) -> list[str]:
    """The target stages of an iteration; what these read brings in all others."""
    if isinstance(recipe, EvaluateRecipe):
        return ["evaluate"]
    if isinstance(recipe, RlhfRecipe):
        return ["publish", "scalars", *(["evaluate"] if evaluates(recipe, iteration) else [])]
    return ["publish"]


def evaluates(recipe: RlhfRecipe, iteration: int) -> bool:
    """Whether version `iteration` is evaluated concurrently with the training of this iteration."""
    return recipe.evaluation.every > 0 and iteration % recipe.evaluation.every == 0


def evaluates_at_end(recipe: Recipe, iteration: int) -> bool:
    """Whether the weights that this iteration publishes are evaluated before its commit: if it is the run's last."""
    return (
        isinstance(recipe, RlhfRecipe) and recipe.evaluation.every > 0 and iteration == recipe.schedule.iterations - 1
    )


def iterations(recipe: Recipe) -> int:
    """The run's total number of iterations."""
    return 1 if isinstance(recipe, EvaluateRecipe) else recipe.schedule.iterations
