"""What a stage receives besides its tables: the run, the recipe in force, and the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, WeightsRef
from schemas.recipe.recipe import Recipe, SftRecipe

if TYPE_CHECKING:
    from areal_tasks.engines.session import Engines
    from areal_tasks.stages.generation import Generation
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
    generation: Generation | None = None  # of a run that generates samples to train on

    @property
    def store(self) -> Store:
        return self.run.store

    @property
    def weights(self) -> WeightsRef:
        """The weights of version `iteration`, with which servers generate. Unset before stage `initialise`."""
        assert self.weights_held is not None, "the initial weights come first"
        return self.weights_held

    @property
    def next_group(self) -> int:
        """The first prompt position that no committed iteration has consumed."""
        return int(self.previous.state["next_group"]) if self.previous else 0

    def state_after(self) -> dict[str, Any]:
        """The prompt positions consumed after the iteration, as its commit records them."""
        if self.generation is not None:
            return self.generation.state()
        return {"next_group": self.next_group + demonstrations(self.recipe)}


def demonstrations(recipe: Recipe) -> int:
    """Prompt positions that one iteration of supervised fine-tuning takes; none in another flow."""
    return recipe.algorithm.batch_size * recipe.algorithm.steps if isinstance(recipe, SftRecipe) else 0
