"""What a person sees of a run in the Prefect UI: a progress bar, sampled rollouts, and a line of log an iteration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from uuid import UUID

import pyarrow as pa
from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from areal_tasks.stages.build import Built
from areal_tasks.stages.loop import Closed
from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from flows.pages import rollout_page, rollout_rows
from schemas.recipe.recipe import EvaluateRecipe, Recipe
from schemas.tables import ROLLOUT

SAMPLED = 12
READ = (
    *("sample_id", "group_id", "sample_index", "prompt", "completion", "answer", "num_generated", "stop_reason"),
    *("version_min", "reward", "verdict"),
)
METRICS = {"verify": ("reward",), "evaluate": ("accuracy",), "train": ("loss", "grad_norm")}


class Observer:
    """Told of every committed iteration. Use as a context: it also shows the log of `areal_tasks` in the UI."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.run = run
        self.log = get_run_logger()
        self.every = 1 if isinstance(recipe, EvaluateRecipe) else recipe.schedule.artifact_every
        self.progress: UUID | None = None
        self.handler = _Relay(self.log)

    def __enter__(self) -> Observer:
        logging.getLogger("areal_tasks").addHandler(self.handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("areal_tasks").removeHandler(self.handler)

    def __call__(self, closed: Closed) -> None:
        self.log.info(summary_line(closed))
        if closed.iteration % self.every == 0 or closed.iteration == closed.of - 1:
            self._progress(closed)
            for label, built in closed.built.items():
                if built.manifest.stage in ("rollout", "evaluate"):
                    self._rollouts(label, closed)

    def _progress(self, closed: Closed) -> None:
        percent = 100.0 * (closed.iteration + 1) / closed.of
        if self.progress is None:
            key = artifact_key(self.run.name, "progress")
            created = create_progress_artifact(percent, key=key, description=f"Iterations of {self.run.name}")
            self.progress = created if isinstance(created, UUID) else None
        else:
            update_progress_artifact(self.progress, percent)

    def _rollouts(self, label: str, closed: Closed) -> None:
        samples = judged_samples(self.run.store, closed.built, label)
        where = f"{label.split()[0]} of iteration {closed.iteration}, run {self.run.name}"
        key = artifact_key(self.run.name, label.split()[0])
        create_table_artifact(rollout_rows(samples, SAMPLED), key=f"{key}-table", description=f"Sampled: {where}")
        create_markdown_artifact(rollout_page(samples, where), key=f"{key}-page", description=f"In full: {where}")


class _Relay(logging.Handler):
    """Passes log records of the libraries below on to the flow run's log."""

    def __init__(self, target: Any) -> None:
        super().__init__(logging.INFO)
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        self.target.log(record.levelno, record.getMessage())


def summary_line(closed: Closed) -> str:
    """`iteration 12/250: reward 0.41, loss -0.01 · 0.38 s`."""
    manifests = [built.manifest for built in closed.built.values()]
    metrics = [(name, m.metrics[name]) for m in manifests for name in METRICS.get(m.stage, ())]
    text = ", ".join(f"{name} {value:.4f}" for name, value in metrics)
    return f"iteration {closed.iteration + 1}/{closed.of}: {text} · {closed.seconds:.2f} s"


def judged_samples(store: Store, built: Mapping[str, Built], label: str) -> pa.Table:
    """Rows of a rollout with its verdicts beside them, by group; an evaluation holds both already."""
    if label != "rollout":
        return read_table(store, built[label].manifest.tables["evaluate"], READ)
    texts = [name for name in READ if name in ROLLOUT.names]
    samples = read_table(store, built["rollout"].manifest.tables["rollout"], texts)
    verdicts = read_table(store, built["verify"].manifest.tables["verify"], ("sample_id", "reward", "verdict"))
    return samples.join(verdicts, "sample_id").sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def artifact_key(run: str, what: str) -> str:
    """A key Prefect accepts: lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())
