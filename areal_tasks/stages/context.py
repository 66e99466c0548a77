"""What a stage is given besides its tables: the run, the recipe in force, and the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

if TYPE_CHECKING:
    from areal_tasks.engines.session import Engines
    from areal_tasks.stages.replay import Recorded


@dataclass
class Context:
    """One iteration as its stages see it."""

    run: Run
    recipe: Recipe
    engines: Engines
    iteration: int
    weights_held: WeightsRef | None
    previous: IterationCommit | None
    previous_digest: str
    recorded: Recorded | None = None  # the same iteration of the run that is replayed

    @property
    def store(self) -> Store:
        return self.run.store

    @property
    def weights(self) -> WeightsRef:
        """The weights of version `iteration`, which generate. Not there before the stage `initialise`."""
        assert self.weights_held is not None, "the initial weights come first"
        return self.weights_held

    @property
    def next_group(self) -> int:
        """Number of the run's first group that no committed iteration has consumed."""
        return int(self.previous.state["next_group"]) if self.previous else 0

    @property
    def group_after(self) -> int:
        """The same, once this iteration is committed."""
        return self.next_group + groups_consumed(self.recipe)


def groups_consumed(recipe: Recipe) -> int:
    """Prompt positions that one iteration takes: groups, demonstrations, or none."""
    if isinstance(recipe, RlhfRecipe):
        return recipe.rollout.groups
    return recipe.algorithm.batch_size * recipe.algorithm.steps if isinstance(recipe, SftRecipe) else 0
