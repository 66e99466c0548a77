"""Small real runs: the loop with its services, driven here or in a process that can be killed at any instant."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import session_folder
import warm_processes
from waiting import LIMIT, PAUSE, alive

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.stages.build import Built
from areal_tasks.stages.checkpoint import Checkpoints
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.replay import loop_of
from areal_tasks.stages.stage import Context
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run, read_stored_run
from areal_tasks.store.runs import Run, load_run
from schemas.manifest import WeightsRef
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import Recipe

#: Environment variable of every process below a driver: the folder it works in.
MARK = "AREAL_TEST_RUN"
GROUPS, ITERATIONS = 4, 3

Digests = list[list[tuple[str, str]]]


def tiny(**changes: dict[str, Any] | int) -> Recipe:
    """A recipe whose run takes seconds; `changes` go to its sections, e.g. `schedule={"iterations": 5}`."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"scratch": {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 16}, "max_length": 12},
        "data": {"source": "sums://2"},
        "rollout": {"groups": GROUPS, "group_size": 4, "max_new_tokens": 3},
        "reward": {"verifier": "stage_reward:digits", "workers": 1},
        "algorithm": {"minibatches": 2, "kl": "loss", "kl_coef": 0.01},
        "trainer": {"lr": 1e-2, "micro_batch_tokens": 64, "threads": 1},
        "inference": {"slots": 16, "groups_per_request": 4, "threads": 1},
        "evaluation": {"every": 2, "limit": 8, "max_new_tokens": 3},
        "schedule": {"iterations": ITERATIONS},
        "launcher": {"type": "inline"},
    }
    merged = {
        name: value if isinstance(value, int) else {**sections.get(name, {}), **value}
        for name, value in changes.items()
    }
    return parse_recipe({"name": "tiny", "flow": "rlhf", **sections, **merged})


def tiny_sft(**changes: dict[str, Any]) -> Recipe:
    """As `tiny`, for supervised fine-tuning."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"scratch": {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 16}, "max_length": 12},
        "data": {"source": "sums://2"},
        "algorithm": {"batch_size": 6, "steps": 2},
        "trainer": {"lr": 1e-2, "micro_batch_tokens": 64, "threads": 1},
        "schedule": {"iterations": ITERATIONS},
        "launcher": {"type": "inline"},
    }
    merged = {name: {**sections.get(name, {}), **value} for name, value in changes.items()}
    return parse_recipe({"name": "tiny-sft", "flow": "sft", **sections, **merged})


def tiny_evaluation(path: str, **changes: dict[str, Any] | int) -> Recipe:
    """Evaluates the weights at `path` as `tiny` does."""
    whole = tiny(**changes).model_dump(mode="json")
    sections = {name: whole[name] for name in ("data", "reward", "inference", "evaluation", "launcher", "workflow")}
    model = {"path": path, "max_length": 12}
    evaluation = {name: value for name, value in whole["evaluation"].items() if name != "every"}
    return parse_recipe(
        {"name": "tiny-evaluation", "flow": "evaluate", **sections, "model": model, "evaluation": evaluation}
    )


def drive(
    folder: Path,
    name: str,
    recipe: Recipe,
    execute: Execute = run_directly,
    origin: Origin | None = None,
    segments: Sequence[tuple[int, Recipe]] = (),
    store: Store | None = None,
    waits: bool = False,
) -> Run:
    """Bring a run to its end, in this process; its store is that of `folder` unless another one is named.

    With `waits` each iteration makes a checkpoint, and waits for it.
    """
    store = store or store_in(folder)
    stored = read_stored_run(store, name, origin)
    recipe, _ = stored.recipe_to_continue(recipe)
    stored.check(recipe)
    run = open_run(store, name, recipe, segments=segments, stored=stored)
    with Engines(run, recipe, folder / "logs", generates=not run.record.counterfactual) as engines:
        loop = loop_of(run)(run, recipe, engines, retrying(execute))
        if waits:
            loop._checkpoints = Waiting()
        loop()
    return run


class Waiting(Checkpoints):
    """A checkpoint of each version, which its commit names."""

    def after(
        self, context: Context, built: Mapping[str, Built], needed: bool, last: bool
    ) -> tuple[WeightsRef | None, float]:
        return super().after(context, built, True, last)


def finished(folder: Path, name: str, recipe: Recipe, waits: bool = False) -> Run:
    """As `drive`, but a copy where a run of that name and recipe has been made in this test run already.

    Not for what depends on more than its recipe, such as a verifier that reads the environment.
    """
    key = hashlib.sha256(f"{name} {waits} {recipe.model_dump_json()}".encode()).hexdigest()[:16]
    made = session_folder.once(f"run-{key}", lambda place: drive(place, name, recipe, waits=waits))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return load_run(store_in(folder), name)


def retrying(execute: Execute) -> Execute:
    """`execute` with retries while an engine is down, as in the flow's tasks."""

    def attempt(job: Job) -> Built:
        end = time.monotonic() + LIMIT
        while True:  # until launcher.restarts are used up
            try:
                return execute([job])[0]
            except (TrainerDown, ServerDown):
                if time.monotonic() > end:
                    raise
            time.sleep(PAUSE)  # as tasks do: a killed process may take a moment to end

    def run(jobs: Sequence[Job]) -> list[Built]:
        return [attempt(job) for job in jobs]

    return run


def store_in(folder: Path) -> Store:
    return open_store((folder / "store").as_uri())


# ── a driver that can be killed ─────────────────────────────────────────────────────────────────────────────────────


def start_driver(
    folder: Path, name: str, recipe: Recipe, die_at: int | str = 0, origin: Origin | None = None
) -> warm_processes.Process:
    """`drive` in a process of its own, killed at `die_at` writes to the store, or before the job of that label."""
    return start_marked(folder, _main, folder, name, recipe, die_at, origin)


def start_marked(folder: Path, function: Callable[..., object], *arguments: object) -> warm_processes.Process:
    """A call in a process of its own. `left_over(folder)` finds what it starts."""
    return warm_processes.Process(_marked_call, str(folder), function, *arguments)


def _marked_call(mark: str, function: Callable[..., object], *arguments: object) -> None:
    os.environ[MARK] = mark
    function(*arguments)


def _main(folder: Path, name: str, recipe: Recipe, die_at: int | str, origin: Origin | None) -> None:
    if isinstance(die_at, int) and die_at:
        _die_at_write(die_at)

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_directly(jobs)

    drive(folder, name, recipe, execute, origin)


def _die_at_write(number: int) -> None:
    """SIGKILL this process at a write to the store: just before it if the number is odd, else just after it."""
    lock, done = threading.Lock(), [0]

    def wrapped(write: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with lock:
                done[0] += 1
                last = done[0] == number
            if last and number % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    for method in ("create", "put", "put_file", "put_pieces"):
        setattr(LocalBackend, method, wrapped(getattr(LocalBackend, method)))


def left_over(folder: Path) -> list[psutil.Process]:
    """Processes that a driver in `folder` has started and that still run."""
    return [p for p in psutil.process_iter() if _marked(p, str(folder))]


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return alive(process) and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


# ── what a run holds ────────────────────────────────────────────────────────────────────────────────────────────────


def digests(folder: Path, name: str) -> Digests:
    """(stage, content digest) of everything each commit selects, and of the weights it made."""
    return digests_of(store_in(folder), name)


def digests_of(store: Store, name: str) -> Digests:
    """The same of a run in any store."""
    run = load_run(store, name)
    head = run.head()
    commits = [run.commit(k) for k in range(head.iteration + 1)] if head else []
    return [[*((s.stage, s.digest) for s in c.stages), ("weights", c.weights.digest)] for c in commits]
