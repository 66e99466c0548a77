"""What each service of a recipe needs of a machine of a cluster."""

from __future__ import annotations

from areal_tasks.engines.starting import trainer_names
from areal_tasks.launchers.cluster import Resources
from schemas.recipe.launcher import Needs
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe


def service_needs(recipe: Recipe, external: bool) -> dict[str, Resources]:
    """What each service of a recipe needs, in the order in which they start. `external` servers run already."""
    found: dict[str, Resources] = {}
    if not isinstance(recipe, EvaluateRecipe):
        found |= dict.fromkeys(trainer_names(recipe), trainer_needs(recipe))
    if isinstance(recipe, RlhfRecipe):
        found |= {f"rollout-{i}": worker_needs(recipe) for i in range(recipe.rollout.workers)}
    if not isinstance(recipe, SftRecipe) and not external:
        found |= {f"inference-{i}": server_needs(recipe) for i in range(recipe.inference.servers)}
    return found


def trainer_needs(recipe: RlhfRecipe | SftRecipe) -> Resources:
    """On each of its machines. A GPU for each rank there; none for a model in float32, as recipes for CPUs have it."""
    on_cpus = recipe.model.dtype == "float32"
    return _needs(recipe.launcher.resources.trainer, 0 if on_cpus else recipe.trainer.ranks // recipe.trainer.nodes)


def server_needs(recipe: RlhfRecipe | EvaluateRecipe) -> Resources:
    """A GPU for each part of the model; none for the embedded server."""
    on_cpus = recipe.inference.engine == "embedded"
    return _needs(recipe.launcher.resources.inference, 0 if on_cpus else recipe.inference.tensor_parallel)


def worker_needs(recipe: Recipe) -> Resources:
    """No GPU."""
    return _needs(recipe.launcher.resources.rollout, 0)


def _needs(stated: Needs, gpus: int) -> Resources:
    return Resources(stated.cpus, gpus if stated.gpus < 0 else stated.gpus, stated.memory_mb)
