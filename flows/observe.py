"""What the Prefect UI shows of a run: a progress bar, each stage, sampled rollouts, and a log line per iteration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from prefect import get_run_logger
from prefect.settings import PREFECT_UI_URL

from areal_tasks.stages.build import Built
from areal_tasks.stages.graphs import iteration_plan
from areal_tasks.stages.jobs import IterationResult
from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from flows.alerts import AlertMonitor
from flows.artifacts import Artifacts
from flows.background import CLOSE_SECONDS, HURRIED_SECONDS
from flows.events import Events, metrics_of
from flows.pages import iteration_page, manifest_page, rollout_page, rollout_rows, seconds_of, stage_line
from flows.tasks import metrics_text
from schemas.manifest import StageManifest
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


class Observer:
    """Called with every committed iteration. As a context manager it also passes the log of `areal_tasks` to the UI."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.run = run
        self.log = get_run_logger()
        self.every = 1 if isinstance(recipe, EvaluateRecipe) else recipe.schedule.artifact_every
        self.once = {stage.name for stage in iteration_plan(recipe, 0).stages if stage.once}
        self.progress: UUID | None = None
        self.events = Events(run)
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
        self.events.started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurried = kind is not None and not issubclass(kind, Exception)  # cancelled: the worker soon kills this process
        self.artifacts.close(HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        self.events.ended()
        LIBRARY.removeHandler(self.handler)
        LIBRARY.setLevel(self.level)
        LIBRARY.propagate = True

    def __call__(self, result: IterationResult) -> None:
        self.log.info(summary_line(result))
        self.events.committed(result)
        self._warn(result)
        whole = result.iteration % self.every == 0 or result.iteration == result.of - 1
        if whole or any(not built.reused and is_long(built) for built in result.news.values()):
            what = f"iteration {result.iteration}"
            self.artifacts.offer(what, lambda artifacts: self._show(artifacts, result, whole))

    def _warn(self, result: IterationResult) -> None:
        for alert in self.watch(metrics_of(result), result.eta) if self.watch else ():
            self.log.warning("%s: %s", alert.cause, alert.message)
            self.events.alert(result, alert)

    # ── in the artifact thread ──────────────────────────────────────────────────────────────────────────────────────

    def _show(self, artifacts: Artifacts, result: IterationResult, whole: bool) -> None:
        """Create the artifacts of one iteration: all of them, or only the manifests of its long stages."""
        pages = {
            label: self._manifest(artifacts, self._task_name(label, result), built.manifest)
            for label, built in result.news.items()
            if not built.reused and built.manifest.provenance.prefect_task_run_id and (whole or is_long(built))
        }
        if not whole:
            return
        self._progress(artifacts, result)
        self._iteration(artifacts, result, pages)
        for label, built in result.built.items():
            if built.manifest.stage in ("rollout", "evaluate"):
                self._rollouts(artifacts, label, result)

    def _manifest(self, artifacts: Artifacts, task: str, manifest: StageManifest) -> UUID:
        """Attach a page with the whole manifest to the task run that built the stage."""
        page = manifest_page(task, self.run.store, manifest)
        task_run = UUID(manifest.provenance.prefect_task_run_id)
        return artifacts.create("markdown", page, None, f"Manifest of {task}", task_run)

    def _progress(self, artifacts: Artifacts, result: IterationResult) -> None:
        percent = 100.0 * (result.iteration + 1) / result.of
        if self.progress is None:
            key, about = artifact_key(self.run.name, "progress"), f"Iterations of {self.run.label}"
            self.progress = artifacts.create("progress", percent, key, about)
        else:
            artifacts.update(self.progress, percent)

    def _iteration(self, artifacts: Artifacts, result: IterationResult, pages: Mapping[str, UUID]) -> None:
        stages = by_stage(result)
        lines = [
            line_of(self._task_name(label, result), built, label in result.news and not built.reused, pages.get(label))
            for label, built in stages
        ]
        paths = [built.ref.path for _, built in stages]
        page = iteration_page(self.run.name, self.run.store.url, summary_line(result), lines, paths)
        about = f"Iteration {result.iteration} of {self.run.label}: its stages and where to go from here"
        artifacts.create("markdown", page, artifact_key(self.run.name, "iteration"), about)

    def _task_name(self, label: str, result: IterationResult) -> str:
        """The name of the task run: `rollout 3`, `evaluate version 3`, `prompts`."""
        if label in self.once or " " in label:
            return label
        return f"evaluate version {result.iteration}" if label == "evaluate" else f"{label} {result.iteration}"

    def _rollouts(self, artifacts: Artifacts, label: str, result: IterationResult) -> None:
        samples = judged_samples(self.run.store, result.built, label)
        what = subject(label, result)
        title, key = f"{what} · run {self.run.label}", artifact_key(self.run.name, label.split()[0])
        trained = result.iteration if label == "rollout" else None
        rows = rollout_rows(samples, SAMPLED, trained)
        about = f"{len(rows)} of {len(samples)} samples: {title}"
        artifacts.create("table", json.dumps(rows), f"{key}-table", about)
        artifacts.create("markdown", rollout_page(samples, what, trained), f"{key}-page", f"In full: {title}")


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
    """Whether the stage took LONG_SECONDS or longer."""
    return seconds_of(built.manifest) >= LONG_SECONDS


def by_stage(result: IterationResult) -> list[tuple[str, Built]]:
    """The iteration's own stages in order of commit, then those built once for the run."""
    items = sorted(result.built.items(), key=lambda item: item[1].manifest.provenance.committed)
    own = [item for item in items if item[1].manifest.iteration == result.iteration]
    return own + [item for item in items if item[1].manifest.iteration != result.iteration]


def line_of(task: str, built: Built, made: bool, page: UUID | None) -> str:
    """A stage as a line of the iteration's page; without links if the UI's address is unknown."""
    manifest, ui = built.manifest, PREFECT_UI_URL.value()
    task_run = manifest.provenance.prefect_task_run_id
    task_url = f"{ui}/runs/task-run/{task_run}" if ui and task_run else ""
    page_url = f"{ui}/artifacts/artifact/{page}" if ui and page else ""
    numbers = metrics_text(manifest.stage, manifest.metrics)
    return stage_line(task, "Committed" if made else "Reused", manifest, numbers, task_url, page_url)


def summary_line(result: IterationResult) -> str:
    """`iteration 11 done (12 of 250): reward 0.41, loss -0.01, grad_norm 1.2, logprob_gap_mean 1e-07 · 0.38 s`."""
    manifests = [built.manifest for built in result.built.values()]
    shown = {name: m.metrics[name] for m in manifests for name in METRICS.get(m.stage, ()) if name in m.metrics}
    metrics = [f"{name} {value:.4g}" for name, value in shown.items()]
    accuracy = [
        evaluation_line(built.manifest.metrics, evaluated_version(label, result))
        for label, built in result.built.items()
        if built.manifest.stage == "evaluate"
    ]
    done = f"iteration {result.iteration} done ({result.iteration + 1} of {result.of})"
    return f"{done}: {', '.join(metrics + accuracy)} · {result.seconds:.2f} s"


def evaluation_line(metrics: Mapping[str, float], version: int) -> str:
    """`accuracy 0.41 (version 3, 12 long prompts left out)`."""
    dropped = metrics.get("prompts_dropped", 0)
    left_out = f", {dropped:.0f} long prompts left out" if dropped else ""
    return f"accuracy {metrics['accuracy']:.4g} (version {version}{left_out})"


def subject(label: str, result: IterationResult) -> str:
    """What an artifact shows: `Rollouts of iteration 3`, `Evaluation of version 4`."""
    if label == "rollout":
        return f"Rollouts of iteration {result.iteration}"
    return f"Evaluation of version {evaluated_version(label, result)}"


def evaluated_version(label: str, result: IterationResult) -> int:
    """The version of the iteration's initial weights, or the one that the label of a second evaluation names."""
    return result.iteration if label == "evaluate" else int(label.split()[-1])


def judged_samples(store: Store, built: Mapping[str, Built], label: str) -> pa.Table:
    """Rows of a rollout joined with its verdicts, sorted by group; an evaluation's table has both already."""
    if label != "rollout":
        return read_table(store, built[label].manifest.tables["evaluate"], READ)
    texts = [name for name in READ if name in ROLLOUT.names]
    samples = read_table(store, built["rollout"].manifest.tables["rollout"], texts)
    judged = ("sample_id", "reward", "verdict", "detail")
    verdicts = read_table(store, built["verify"].manifest.tables["verify"], judged)
    return samples.join(verdicts, "sample_id").sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def artifact_key(run: str, what: str) -> str:
    """A key that Prefect accepts: lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())
