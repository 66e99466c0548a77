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
    *("version_min", "reward", "verdict", "detail"),
)
METRICS = {"verify": ("reward",), "train": ("loss", "grad_norm", "logprob_gap_mean")}
LIBRARY = logging.getLogger("areal_tasks")


class Observer:
    """Told of every committed iteration. Use as a context: it also shows the log of `areal_tasks` in the UI."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.run = run
        self.log = get_run_logger()
        self.every = 1 if isinstance(recipe, EvaluateRecipe) else recipe.schedule.artifact_every
        self.progress: UUID | None = None
        self.handler = _Relay(self.log)
        self.level = LIBRARY.level

    def __enter__(self) -> Observer:
        LIBRARY.addHandler(self.handler)
        LIBRARY.setLevel(logging.INFO)
        LIBRARY.propagate = False  # the run's log is on the terminal too: no line of it twice
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LIBRARY.removeHandler(self.handler)
        LIBRARY.setLevel(self.level)
        LIBRARY.propagate = True

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
        what = subject(label, closed)
        title, key = f"{what} · run {self.run.name}", artifact_key(self.run.name, label.split()[0])
        rows = rollout_rows(samples, SAMPLED)
        create_table_artifact(rows, key=f"{key}-table", description=f"{len(rows)} of {len(samples)} samples: {title}")
        create_markdown_artifact(rollout_page(samples, what), key=f"{key}-page", description=f"In full: {title}")


class _Relay(logging.Handler):
    """Passes log records of the libraries below on to the flow run's log."""

    def __init__(self, target: Any) -> None:
        super().__init__(logging.INFO)
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        self.target.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def summary_line(closed: Closed) -> str:
    """`iteration 11 done (12 of 250): reward 0.41, loss -0.01, grad_norm 1.2, logprob_gap_mean 1e-07 · 0.38 s`."""
    manifests = [built.manifest for built in closed.built.values()]
    shown = [(name, m.metrics) for m in manifests for name in METRICS.get(m.stage, ()) if name in m.metrics]
    metrics = [f"{name} {found[name]:.4g}" for name, found in shown]
    accuracy = [
        f"accuracy of version {evaluated_version(label, closed)} {built.manifest.metrics['accuracy']:.4g}"
        for label, built in closed.built.items()
        if built.manifest.stage == "evaluate"
    ]
    done = f"iteration {closed.iteration} done ({closed.iteration + 1} of {closed.of})"
    return f"{done}: {', '.join(metrics + accuracy)} · {closed.seconds:.2f} s"


def subject(label: str, closed: Closed) -> str:
    """What an artifact shows: `Rollouts of iteration 3`, `Evaluation of version 4`."""
    if label == "rollout":
        return f"Rollouts of iteration {closed.iteration}"
    return f"Evaluation of version {evaluated_version(label, closed)}"


def evaluated_version(label: str, closed: Closed) -> int:
    """An iteration evaluates the weights it began with; the label of a second evaluation names its version."""
    return closed.iteration if label == "evaluate" else int(label.split()[-1])


def judged_samples(store: Store, built: Mapping[str, Built], label: str) -> pa.Table:
    """Rows of a rollout with its verdicts beside them, by group; an evaluation holds both already."""
    if label != "rollout":
        return read_table(store, built[label].manifest.tables["evaluate"], READ)
    texts = [name for name in READ if name in ROLLOUT.names]
    samples = read_table(store, built["rollout"].manifest.tables["rollout"], texts)
    judged = ("sample_id", "reward", "verdict", "detail")
    verdicts = read_table(store, built["verify"].manifest.tables["verify"], judged)
    return samples.join(verdicts, "sample_id").sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def artifact_key(run: str, what: str) -> str:
    """A key Prefect accepts: lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())
