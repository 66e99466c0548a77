"""The services of a run and how early each can start: servers need weights for this, the trainer does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NewType

from areal_tasks.data.datasets import splits
from areal_tasks.engines.models import file_states
from areal_tasks.engines.service import ModelFolder
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.runs import Run
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe

TRAINER: Final = "trainer"
#: A trainer of a run: also the name of its first service, and of the group of its services.
Role = NewType("Role", str)
ACTOR: Final = Role(TRAINER)  # it trains the policy that generates
ROLES: tuple[Role, ...] = (ACTOR,)
MODULES: Final = {name: f"areal_tasks.engines.{name}" for name in ("embedded", "sglang", TRAINER)}

#: What ends the wait for a service that no machine runs yet.
NO_MACHINE: Final = "launcher.queue_seconds until a machine runs it, then launcher.startup_seconds"
STARTS: Final = "launcher.startup_seconds"


def trainer_names(recipe: Recipe, *roles: Role) -> list[str]:
    """The names of the services of these trainers (none named: of all): one on each machine of a trainer."""
    nodes = 1 if isinstance(recipe, EvaluateRecipe) else recipe.trainer.nodes
    return [f"{role}-{node}" if node else role for role in roles or ROLES for node in range(nodes)]


def worker_names(recipe: Recipe) -> list[str]:
    """The rollout workers that generate training's groups."""
    return [f"rollout-{i}" for i in range(recipe.rollout.workers)] if isinstance(recipe, RlhfRecipe) else []


def evaluator_names(recipe: Recipe) -> list[str]:
    """The rollout worker that generates the groups of evaluations: what ends it costs training nothing."""
    return ["rollout-evaluation"] if "eval_prompts" in splits(recipe) else []


def startable_folder(run: Run, recipe: Recipe) -> ModelFolder | None:
    """The model's local folder, if SGLang can start on it while the first start of a run copies it into the store.

    Later starts and derived runs begin with weights in a store, which alone the embedded engine reads.
    """
    if isinstance(recipe, SftRecipe) or recipe.inference.engine != "sglang" or recipe.launcher.network:
        return None
    path = Path(recipe.model.path).expanduser()
    if not recipe.model.path or not path.is_dir() or run.owner != 1 or run.record.parent:
        return None
    return ModelFolder(path=str(path.absolute()), files=file_states(path))


def may_load_early(recipe: Recipe) -> bool:
    """Whether the recipe's trainer can load its model while inference servers start.

    It cannot if the servers would have to release the memory that their first rollout needs, or if both are threads of
    one process, which share torch's default dtype.
    """
    if isinstance(recipe, EvaluateRecipe) or recipe.launcher.type == "inline":
        return False
    return isinstance(recipe, SftRecipe) or not recipe.inference.release_memory


def ready(
    supervisor: Supervisor, watchdog: Watchdog, names: Sequence[str], weights: WeightsRef | None = None
) -> list[str]:
    """The addresses of these services, once they have started; one that has ended is restarted, on `weights`."""
    with watchdog.waiting("its start", partial(starting, supervisor, names), limit=STARTS):
        return supervisor.wait(names, weights)


def starting(supervisor: Supervisor, names: Sequence[str]) -> dict[str, Heartbeat]:
    """Heartbeats of those of these services that have not started, or not again: what each waits for, and its limit."""
    known = [name for name in names if name in supervisor.services]
    services = [one for name in known for one in supervisor.members(name) if not one.url and not one.logged]
    found = [(s.spec.name, s.handle.waiting(), s.reason.strip() or f"see {s.job.log}") for s in services]
    return {name: Heartbeat(None, why or other, NO_MACHINE if why else STARTS) for name, why, other in found}
