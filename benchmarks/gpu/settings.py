"""What measurements of whole iterations and their baselines run with: one recipe, and what a shape changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

RECIPE: Final = "benchmarks/gpu/iteration.yaml"
#: To try a measurement without a GPU.
TRAINER_ON_CPU: Final = (
    "model.dtype=float32",
    "trainer.backend=local",
    "trainer.compile=false",
    "trainer.threads=1",
)
ON_CPU: Final = (
    *TRAINER_ON_CPU,
    "inference.engine=embedded",
    "inference.flags={}",
    "inference.memory_fraction=0",
    "trainer.weights_every=1",
    "inference.threads=1",
)
#: Passes: with the recipe's number of tokens the GPU would be done with a small model's pass before the host.
#: Seconds to recover: eight iterations' training, so that one checkpoint falls into the part of a run that is measured.
OF_SHAPE: Final[dict[str, dict[str, str]]] = {
    "135m": {
        "rollout.groups": "32",
        "trainer.micro_batch_tokens": "65536",
        "trainer.recover_within_seconds": "3.4",
    },
    "0.5b": {"trainer.micro_batch_tokens": "32768", "trainer.recover_within_seconds": "17"},
    "1.5b": {"trainer.recover_within_seconds": "40"},
}


def words_of(shape: str, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides of the recipe for a shape, `overrides` last, so that they win."""
    return [*(f"{key}={value}" for key, value in OF_SHAPE.get(shape, {}).items()), *overrides]


def recipe_of_shape(shape: str, overrides: Sequence[str] = (), recipe: str = RECIPE) -> RlhfRecipe:
    """The recipe as it is run on a shape."""
    found = load_recipe(recipe, words_of(shape, overrides))
    assert isinstance(found, RlhfRecipe)
    return found


def samples_of(recipe: RlhfRecipe) -> int:
    """Samples of an iteration."""
    return recipe.rollout.groups * recipe.rollout.group_size


def concurrency_of(recipe: RlhfRecipe) -> int:
    """How many samples a run has under way at once."""
    most = recipe.inference.max_concurrent_requests * recipe.inference.groups_per_request * recipe.rollout.group_size
    return min(samples_of(recipe), most)


def step_length(ours: Mapping[str, Any]) -> int:
    """Tokens of each sequence of the plain step that stands for a run's iteration, of whose result this is."""
    return round(float(ours["mean_tokens"]) / 8) * 8
