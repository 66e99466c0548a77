"""Starts the services of a run, each as early as possible (the trainer needs no weights to start, servers do)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_tasks.engines.models import file_states
from areal_tasks.engines.service import ModelFolder, spec_of
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.gpus import Placement, describe, place_recipe, visible_gpus
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.runs import Run
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe

log = logging.getLogger(__name__)

TRAINER: Final = "trainer"
MODULES: Final = {name: f"areal_tasks.engines.{name}" for name in ("embedded", "sglang", TRAINER)}

WORKER: Final = "areal_tasks.rollout.worker"


def place_services(recipe: Recipe, serverless: bool) -> Placement:
    """The GPUs of each service, among those that this process may use; writes them to the log.

    `serverless`: the run starts no inference servers. Raises as `place_recipe`.
    """
    found = place_recipe(recipe, visible_gpus(), serverless)
    if assigned := describe(found):
        log.info("%s", assigned)
    return found


@dataclass(frozen=True)
class Services:
    """Starts a run's services; `names` are those of its inference servers, `workers` those of its rollout workers."""

    supervisor: Supervisor
    run: Run
    recipe: Recipe
    names: Sequence[str]
    workers: Sequence[str]
    placement: Placement

    def start_early(self) -> None:
        """Start what needs no weights in the store: trainer, rollout workers, servers that can read a model folder."""
        if not isinstance(self.recipe, EvaluateRecipe):
            spec = spec_of(self.run, self.recipe, TRAINER, None, self.placement.trainer)
            self.supervisor.start(MODULES[TRAINER], spec, self.recipe.trainer.threads)
        for name in self.workers:
            self.supervisor.start(WORKER, spec_of(self.run, self.recipe, name, None), threads=1)
        if (folder := own_folder(self.run, self.recipe)) is not None:
            self.start_servers(folder)

    def start_servers(self, weights: WeightsRef | ModelFolder) -> None:
        """Start the servers on `weights`. For those that started on the model's folder, record `weights` as theirs."""
        assert not (self.names and isinstance(self.recipe, SftRecipe))
        ref, folder = (None, weights) if isinstance(weights, ModelFolder) else (weights, None)
        for i, name in enumerate(self.names):
            inference, gpus = self.recipe.inference, self.placement.servers[i : i + 1]  # type: ignore[union-attr]
            users = self.placement.users(i)
            spec = spec_of(self.run, self.recipe, name, ref, gpus[0] if gpus else (), users, folder)
            if name in self.supervisor.services:
                self.supervisor.began_on(name, ref)
            else:
                self.supervisor.start(MODULES[inference.engine], spec, inference.threads)


def own_folder(run: Run, recipe: Recipe) -> ModelFolder | None:
    """The model's local folder, if SGLang can start on it while the first start of a run copies it into the store.

    Later starts and child runs begin with weights in a store, and the folder may have changed since. The embedded
    engine reads only the store.
    """
    if isinstance(recipe, SftRecipe) or recipe.inference.engine != "sglang":
        return None
    path = Path(recipe.model.path).expanduser()
    if not recipe.model.path or not path.is_dir() or run.owner != 1 or run.record.parent:
        return None
    return ModelFolder(path=str(path.absolute()), files=file_states(path))


def may_load_early(recipe: Recipe) -> bool:
    """Whether the recipe's trainer can load its model while inference servers start.

    Not if the servers would have to lend it the memory that their first rollout needs, nor in threads of one process,
    which share torch's default dtype.
    """
    if isinstance(recipe, EvaluateRecipe) or recipe.launcher.type == "inline":
        return False
    return isinstance(recipe, SftRecipe) or not recipe.inference.release_memory


def ready(
    supervisor: Supervisor, watchdog: Watchdog, names: Sequence[str], weights: WeightsRef | None = None
) -> list[str]:
    """The addresses of these services, once they have started; one that has ended is restarted, on `weights`."""

    def starting() -> dict[str, Heartbeat]:
        return {name: Heartbeat(None, f"see {log}") for name, log in supervisor.starting(names).items()}

    with watchdog.waiting("its start", starting, limit="launcher.startup_seconds"):
        return supervisor.wait(names, weights)
