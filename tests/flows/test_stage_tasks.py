"""Stages as Prefect tasks, on a real Prefect server but without engines."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from prefect.context import FlowRunContext
from prefect.states import Failed

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.stages.build import Built, PrefectIds
from areal_tasks.stages.jobs import Job
from areal_tasks.stages.stage import Kind, Output, Stage
from areal_tasks.store.backend import Missing, StoreError, Unavailable
from flows.tasks import StageTasks, worth_retrying
from schemas.errors import UserError
from schemas.manifest import Provenance, StageManifest, StageRef
from schemas.recipe.launcher import Launcher

ITERATIONS = 4


class NothingToDo(Job):
    """A job that has been built already."""

    def run(self, ids: PrefectIds) -> Built:
        made = Provenance(code_version="c", host="h", owner=1, started="s", committed="c")
        manifest = StageManifest(
            run="r",
            iteration=0,
            stage=self.stage.name,
            attempt="a",
            key="k",
            digest="d",
            inputs=(),
            tables={},
            provenance=made,
        )
        path = f"r/{self.label}.json"
        ref = StageRef(stage=self.stage.name, key="k", path=path, sha256="s", digest="d")
        return Built(self.label, manifest, ref, False)


def job(stage: str, iteration: int, restarts: int = 3) -> NothingToDo:
    never: Any = Output
    recipe = SimpleNamespace(launcher=Launcher(restarts=restarts))
    context: Any = SimpleNamespace(recipe=recipe, iteration=iteration)
    return NothingToDo(Stage(stage, Kind.PURE, 1, never, ()), context, {})


@flow
def iterations() -> list[tuple[list[str], int, int]]:
    """After each iteration: the paths that were built, how many jobs are in memory, and how much Prefect keeps."""
    tasks, jobs, found = StageTasks(lambda: None), list[weakref.ref[Job]](), []
    for k in range(ITERATIONS):
        batches = [[job("alone", k)], [job("left", k), job("right", k)]]
        jobs += [weakref.ref(one) for batch in batches for one in batch]
        paths = [built.ref.path for batch in batches for built in tasks(batch)]
        del batches
        gc.collect()
        context = FlowRunContext.get()
        assert context is not None
        runner: Any = context.task_runner
        kept = len(context.run_results) + len(context.task_run_assets) + len(runner._cancel_events)
        found.append((paths, sum(one() is not None for one in jobs), kept))
    return found


def test_a_flow_run_keeps_nothing_of_iterations_that_are_over(api: str) -> None:
    found = iterations()
    assert [paths for paths, _, _ in found] == [
        [f"r/alone {k}.json", f"r/left {k}.json", f"r/right {k}.json"] for k in range(ITERATIONS)
    ]
    kept = [(jobs, of_prefect) for _, jobs, of_prefect in found]
    assert kept[0][0] <= 3 and kept == [kept[0]] * ITERATIONS


def test_the_number_of_retries_is_that_of_the_iterations_recipe() -> None:
    """`arealflow set` may change `launcher.restarts` during a run."""
    tasks = StageTasks(lambda: None)
    assert [tasks._task(job("train", k, restarts)).retries for k, restarts in enumerate((3, 20, 1))] == [4, 21, 3]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unavailable("S3 does not answer"), True),
        (ServerDown("it hangs"), True),
        (TrainerDown("it is gone"), True),
        (RuntimeError("CUDA error"), True),
        (StoreError("a shard is damaged"), False),
        (Missing("a manifest"), False),
        (UserError("no such recipe"), False),
        (KeyError("a column"), False),
    ],
)
def test_what_may_come_back_by_itself_is_tried_again(error: Exception, again: bool) -> None:
    none: Any = None
    assert worth_retrying(none, none, Failed(data=error)) is again
