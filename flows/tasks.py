"""Stages as Prefect tasks: one task run per stage and iteration, ending in the state `Committed` or `Reused`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext
from prefect.futures import PrefectFuture, wait
from prefect.runtime import flow_run, task_run
from prefect.states import Completed
from prefect.task_engine import run_task_sync

from areal_tasks.stages.build import Built, PrefectIds
from areal_tasks.stages.jobs import Job
from areal_tasks.store.backend import Unavailable
from flows.pages import metrics_text
from schemas.errors import UserError

RETRY_DELAYS = [1.0, 5.0, 20.0]


class StageTasks:
    """Runs jobs as tasks of their stages. Prefect sees labels and manifest paths, never data.

    `before` is called before each batch of jobs. May be called from several threads.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)  # below that it only repeats the states
        self._tasks: dict[tuple[str, int], Task[..., Any]] = {}  # few: Prefect keeps each one's function
        self._jobs: dict[str, Job] = {}
        self._built: dict[str, Built] = {}

    def __call__(self, jobs: Sequence[Job]) -> list[Built]:
        """Run the jobs, concurrently if there are several; returns what they built. Raises what a job raised."""
        self._before()
        self._jobs |= {job.label: job for job in jobs}
        try:
            if len(jobs) == 1:
                run_task_sync(self._task(jobs[0]), parameters={"label": jobs[0].label, "inputs": _paths(jobs[0])})
                _forget()
            else:
                futures = [self._task(job).submit(job.label, _paths(job)) for job in jobs]
                wait(futures)
                _forget(*futures)
                for future in futures:
                    future.result()
        finally:
            for job in jobs:  # a job holds its iteration's manifests
                del self._jobs[job.label]
        return [self._built.pop(job.label) for job in jobs]

    def _task(self, job: Job) -> Task[..., Any]:
        """The task of the job's stage, with the retries of the recipe in force: a run may change its restarts."""
        name, restarts = job.stage.name, job.context.recipe.launcher.restarts
        if (name, restarts) in self._tasks:
            return self._tasks[name, restarts]

        def run_stage(label: str, inputs: dict[str, str]) -> State[Any]:
            ids = PrefectIds(flow_run=flow_run.get_id() or "", task_run=task_run.get_id() or "")
            self._built[label] = built = self._jobs[label].run(ids)
            return final_state(built)

        self._tasks[name, restarts] = Task(
            run_stage,
            name=name,
            task_run_name="{label}",  # no tags: each would cost a request for its concurrency limit, up to 2 s
            retries=max(len(RETRY_DELAYS), restarts + 1),  # the last one raises that no restart is left, and why
            retry_delay_seconds=RETRY_DELAYS,
            retry_condition_fn=worth_retrying,
            persist_result=False,
        )
        return self._tasks[name, restarts]


def _paths(job: Job) -> dict[str, str]:
    return {name: built.ref.path for name, built in job.inputs.items()}


def final_state(built: Built) -> State[Any]:
    """`Reused` if the result existed, else `Committed`; the message gives tables, metrics and the manifest's path."""
    tables = ", ".join(f"{name}: {ref.rows} rows" for name, ref in built.manifest.tables.items())
    metrics = metrics_text(built.manifest.stage, built.manifest.metrics)
    message = " · ".join(part for part in (tables, metrics, built.ref.path) if part)
    # No data: the flow run's context would keep an entry per result until the run ends.
    return Completed(name="Reused" if built.reused else "Committed", message=message)


def worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether to retry: an engine that failed or a store that is away may recover; other errors need a change."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Unavailable):
        return True
    return not isinstance(error, (UserError, AssertionError, TypeError, LookupError, ValueError))


def _forget(*over: PrefectFuture[Any]) -> None:
    """Remove what Prefect would keep of task runs until the flow run ends: their assets, and an event if submitted.

    No task here has assets. `over`: the submitted task runs, which have ended.
    """
    if (context := FlowRunContext.get()) is not None:
        context.task_run_assets.clear()
        for future in over:
            context.task_runner._cancel_events.pop(future.task_run_id, None)  # type: ignore[attr-defined]
