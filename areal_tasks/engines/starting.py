"""Starts the services of a run, each as early as it can be: the trainer needs no weights to start, servers do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from areal_tasks.engines.service import spec_of
from areal_tasks.launchers.gpus import Placement, describe, place_recipe, visible_gpus
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.runs import Run
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe

log = logging.getLogger(__name__)

TRAINER: Final = "trainer"
MODULES: Final = {
    "embedded": "areal_tasks.engines.embedded",
    "sglang": "areal_tasks.engines.sglang",
    TRAINER: "areal_tasks.engines.trainer",
}


def place_services(recipe: Recipe, others: bool) -> Placement:
    """The GPUs of each service, of those that this process may use; the log says who sits where.

    `others`: inference servers are not this run's. Raises as `place_recipe`.
    """
    found = place_recipe(recipe, visible_gpus(), others)
    if assigned := describe(found):
        log.info("%s", assigned)
    return found


def start_trainer(supervisor: Supervisor, run: Run, recipe: Recipe, placement: Placement) -> None:
    """Start the recipe's trainer, if it has one. It holds nothing until it is told to load something."""
    if not isinstance(recipe, EvaluateRecipe):
        spec = spec_of(run, recipe, TRAINER, None, placement.trainer)
        supervisor.start(MODULES[TRAINER], spec, recipe.trainer.threads)


def start_servers(
    supervisor: Supervisor, run: Run, recipe: Recipe, placement: Placement, names: Sequence[str], weights: WeightsRef
) -> None:
    """Start the inference servers of these names on `weights`."""
    assert not (names and isinstance(recipe, SftRecipe))
    for i, name in enumerate(names):
        inference, gpus = recipe.inference, placement.servers[i : i + 1]  # type: ignore[union-attr]
        spec = spec_of(run, recipe, name, weights, gpus[0] if gpus else (), placement.users(i))
        supervisor.start(MODULES[inference.engine], spec, inference.threads)


def may_load_early(recipe: Recipe) -> bool:
    """Whether the recipe's trainer can load its model while inference servers start.

    Not where they would lend it the memory that their first rollout needs, nor in threads of one process, whose
    models share torch's default precision.
    """
    if isinstance(recipe, EvaluateRecipe) or recipe.launcher.type == "inline":
        return False
    return isinstance(recipe, SftRecipe) or not recipe.inference.release_memory


class Early:
    """Work that begins before its result is asked for, in a thread that the end of the process does not wait for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done: Future[object] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Start `work`. Returns at once."""
        self._done = done = Future[object]()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the work is over, or at once within it. Raises what it raised; who asks later is not told."""
        done = self._done
        if done is None or threading.current_thread() is self._thread:
            return
        try:
            done.result()
        finally:
            self._done = None
