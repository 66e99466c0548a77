"""What Prefect shows of a run: a progress bar, each stage, sampled rollouts, a log line and an event per iteration.

The resource of the events is the flow run, so they appear in its event feed, and automations can relate them to the
flow run's own states: `deployments/automations/alerts.yaml` does. Prefect sends events in its own thread and drops them
if the server is down; nothing here fails a run.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from prefect import get_run_logger
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import IterationResult
from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from flows.alerts import AlertMonitor
from flows.artifacts import Artifacts
from flows.background import CLOSE_SECONDS, HURRIED_SECONDS
from flows.pages import iteration_page, manifest_page, rollout_page, rollout_rows, seconds_of, stage_line
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe
from schemas.tables import ROLLOUT

SAMPLED = 12
READ = (
    *("sample_id", "group_id", "sample_index", "prompt", "completion", "answer", "num_generated", "stop_reason"),
    *("version_min", "version_max", "reward", "verdict", "detail"),
)
METRICS = {
    "verify": ("reward",),
    "train": ("loss", "grad_norm", "logprob_gap_mean", "lag_mean"),
    "publish": ("logprob_gap_mean",),  # where samples are too old to measure it
}
#: A stage that takes this long always gets its manifest as an artifact: the cost is negligible there.
LONG_SECONDS: Final = 10.0
LIBRARY = logging.getLogger("areal_tasks")
STARTED: Final = "arealflow.run.started"
ADVANCED: Final = "arealflow.run.advanced"
ENDED: Final = "arealflow.run.ended"
COMMITTED: Final = "arealflow.iteration.committed"
#: Least time between two ADVANCED events, by which the automation for stalled runs sees progress: Prefect miscounts
#: such events if they follow each other immediately, and each is a write to its database.
ADVANCED_SECONDS: Final = 10.0


class Observer:
    """Called with every committed iteration. As a context manager it also passes the log of `areal_tasks` to the UI."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.run = run
        self.log = get_run_logger()
        self.every = 1 if isinstance(recipe, EvaluateRecipe) else recipe.schedule.artifact_every
        self.about = {"run": run.name, "store": run.store.url}
        self.resource = {
            "prefect.resource.id": f"prefect.flow-run.{flow_run.get_id()}",
            "prefect.resource.name": flow_run.get_name() or run.name,
            "arealflow.run": run.name,
        }
        self.advanced = time.monotonic()
        self.watch: AlertMonitor | None = None
        if isinstance(recipe, RlhfRecipe) and not run.record.counterfactual:
            self.watch = AlertMonitor(recipe.alerts)
        self.artifacts = Artifacts(self.log)
        self.handler = _Relay(self.log)
        self.level = LIBRARY.level

    def __enter__(self) -> Observer:
        LIBRARY.addHandler(self.handler)
        LIBRARY.setLevel(logging.INFO)
        LIBRARY.propagate = False  # the run's logger prints to the terminal too: no duplicate lines
        self.advanced = time.monotonic()
        self._emit(STARTED, {})
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        hurried = error is not None and not isinstance(error, Exception)  # cancelled: soon killed by the worker
        self.artifacts.close(HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        self._emit(ENDED, {})
        LIBRARY.removeHandler(self.handler)
        LIBRARY.setLevel(self.level)
        LIBRARY.propagate = True

    def __call__(self, result: IterationResult) -> None:
        self.log.info(summary_line(result))
        where = {"iteration": result.iteration, "of": result.of, "seconds": round(result.seconds, 3)}
        metrics = {built.manifest.stage: built.manifest.metrics for built in result.news if built.manifest.metrics}
        finite = {stage: {name: number(value) for name, value in found.items()} for stage, found in metrics.items()}
        self._emit(COMMITTED, {**where, "metrics": finite})
        if time.monotonic() - self.advanced >= ADVANCED_SECONDS:
            self.advanced = time.monotonic()
            self._emit(ADVANCED, where)
        for alert in self.watch(metrics, result.eta) if self.watch else ():
            self.log.warning("%s: %s", alert.cause, alert.message)
            figures = {"value": number(alert.value), "threshold": number(alert.threshold)}
            about = {"cause": alert.cause, "message": alert.message, "iteration": result.iteration}
            self._emit(f"arealflow.alert.{alert.cause}", about | figures)
        whole = result.iteration % self.every == 0 or result.iteration == result.of - 1
        if whole or any(not built.reused and is_long(built) for built in result.news):
            self.artifacts.offer(f"iteration {result.iteration}", partial(self._show, result, whole))

    def _emit(self, event: str, payload: dict[str, Any]) -> None:
        emit_event(event, self.resource, payload=self.about | payload)

    # ── in the artifact thread ──────────────────────────────────────────────────────────────────────────────────────

    def _show(self, result: IterationResult, whole: bool) -> None:
        """Create the artifacts of one iteration: all of them, or only the manifests of its long stages."""
        pages = {
            built.label: self._manifest(built)
            for built in result.news
            if not built.reused and built.manifest.provenance.prefect_task_run_id and (whole or is_long(built))
        }
        if not whole:
            return
        percent = 100.0 * (result.iteration + 1) / result.of
        about = f"Iterations of {self.run.label}"
        self.artifacts.show("progress", percent, artifact_key(self.run.name, "progress"), about)
        self._iteration(result, pages)
        for built in result.built.values():
            if built.manifest.stage in ("rollout", "evaluate"):
                self._rollouts(built, result)

    def _manifest(self, built: Built) -> UUID:
        """Attach a page with the whole manifest to the task run that built the stage."""
        page = manifest_page(built.label, self.run.store, built.manifest)
        task_run = UUID(built.manifest.provenance.prefect_task_run_id)
        return self.artifacts.create("markdown", page, None, f"Manifest of {built.label}", task_run)

    def _iteration(self, result: IterationResult, pages: Mapping[str, UUID]) -> None:
        stages = in_order(result)
        ui, made = PREFECT_UI_URL.value() or "", [one for one in result.news if not one.reused]
        lines = [stage_line(one, one in made, ui, pages.get(one.label)) for one in stages]
        paths = [built.ref.path for built in stages]
        page = iteration_page(self.run.name, self.run.store.url, summary_line(result), lines, paths)
        about = f"Iteration {result.iteration} of {self.run.label}: its stages and where to go from here"
        self.artifacts.create("markdown", page, artifact_key(self.run.name, "iteration"), about)

    def _rollouts(self, built: Built, result: IterationResult) -> None:
        samples, stage = judged_samples(self.run.store, built, result), built.manifest.stage
        rollout, number = stage == "rollout", built.label.split()[-1]
        what = f"Rollouts of iteration {number}" if rollout else f"Evaluation of version {number}"
        title, key = f"{what} · run {self.run.label}", artifact_key(self.run.name, stage)
        trained = result.iteration if rollout else None
        rows = rollout_rows(samples, SAMPLED, trained)
        about = f"{len(rows)} of {len(samples)} samples: {title}"
        self.artifacts.create("table", json.dumps(rows), f"{key}-table", about)
        self.artifacts.create("markdown", rollout_page(samples, what, trained), f"{key}-page", f"In full: {title}")


class _Relay(logging.Handler):
    """Passes log records of `areal_tasks` on to the flow run's log."""

    def __init__(self, target: Any) -> None:
        super().__init__(logging.INFO)
        self.target = target
        self.context = copy_context()  # Prefect's settings, which background threads lack

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record with Prefect's settings, in any thread. Raises nothing."""
        try:
            log = partial(self.target.log, exc_info=record.exc_info)
            self.context.copy().run(log, record.levelno, record.getMessage())
        except Exception:  # as in logging's own handlers: a failed log line must not raise
            self.handleError(record)


def is_long(built: Built) -> bool:
    return seconds_of(built.manifest) >= LONG_SECONDS


def in_order(result: IterationResult) -> list[Built]:
    """The iteration's own stages in order of commit, then those built once for the run."""
    found = sorted(result.built.values(), key=lambda built: built.manifest.provenance.committed)
    return sorted(found, key=lambda built: built.manifest.iteration != result.iteration)


def summary_line(result: IterationResult) -> str:
    """`iteration 11 done (12 of 250): reward 0.41, loss -0.01, grad_norm 1.2, logprob_gap_mean 1e-07 · 0.38 s`."""
    manifests = [built.manifest for built in result.built.values()]
    shown = {name: m.metrics[name] for m in manifests for name in METRICS.get(m.stage, ()) if name in m.metrics}
    metrics = [f"{name} {value:.4g}" for name, value in shown.items()]
    accuracy = [evaluation_line(built) for built in result.built.values() if built.manifest.stage == "evaluate"]
    done = f"iteration {result.iteration} done ({result.iteration + 1} of {result.of})"
    return f"{done}: {', '.join(metrics + accuracy)} · {result.seconds:.2f} s"


def evaluation_line(built: Built) -> str:
    """`accuracy 0.41 (version 3, 12 long prompts left out)`."""
    metrics = built.manifest.metrics
    dropped = metrics.get("prompts_dropped", 0)
    left_out = f", {dropped:.0f} long prompts left out" if dropped else ""
    return f"accuracy {metrics['accuracy']:.4g} ({built.label.removeprefix('evaluate ')}{left_out})"


def judged_samples(store: Store, built: Built, result: IterationResult) -> pa.Table:
    """Rows of a rollout joined with its verdicts, sorted by group; an evaluation's table has both already."""
    if built.manifest.stage == "evaluate":
        return read_table(store, built.manifest.tables["evaluate"], READ)
    texts = [name for name in READ if name in ROLLOUT.names]
    samples = read_table(store, built.manifest.tables["rollout"], texts)
    judged = ("sample_id", "reward", "verdict", "detail")
    verdicts = read_table(store, result.built["verify"].manifest.tables["verify"], judged)
    return samples.join(verdicts, "sample_id").sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def artifact_key(run: str, what: str) -> str:
    """A key that Prefect accepts: lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())


def number(value: float) -> float | None:
    """The value for JSON, which has no NaN: None if it is not finite."""
    return value if math.isfinite(value) else None
