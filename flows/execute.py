"""What the three flows share: from a recipe to a run that has all its iterations."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from areal_tasks.engines.session import Engines
from areal_tasks.stages.build import PrefectIds
from areal_tasks.stages.loop import IterationResult
from areal_tasks.stages.preflight import check_code, check_engines, check_inputs
from areal_tasks.stages.replay import loop_of
from areal_tasks.store.backend import StoreError, open_store
from areal_tasks.store.commit import find_record
from areal_tasks.store.fork import Origin, check_forkable, inherit_model, origin_of, read_fork
from areal_tasks.store.journal import append
from areal_tasks.store.paths import run_record
from areal_tasks.store.runs import Run, load_run, open_run
from areal_tasks.store.segments import continued
from flows.credentials import take_s3_keys
from flows.home import logs_folder, look_in
from flows.observe import Observer
from flows.patience import Patience, patiently
from flows.pauses import Pauses
from flows.startup import Startup, flow_begins, mark
from flows.tasks import StageTasks
from flows.waits import Waits
from schemas.errors import UserError
from schemas.manifest import RunRecord
from schemas.recipe.load import apply_overrides, parse_recipe
from schemas.recipe.recipe import BaseRecipe, Recipe

R = TypeVar("R", bound=BaseRecipe)

#: What a signal means while the flow run is in a state of this type.
ENDS: Final = {"CANCELLING": "cancelled", "CANCELLED": "cancelled", "PAUSED": "suspended"}
#: In seconds. Prefect's client tries four times to connect; a worker kills 7 s after it has asked a flow to end.
ASK_TIMEOUT: Final = httpx.Timeout(2.0, connect=1.0)


def prepared(recipe: R, overrides: str) -> R:
    """The recipe with its overrides, after everything that can be checked before a run exists. Raises UserError."""
    flow_begins(nested=flow_run.get_parent_flow_run_id() is not None)
    hide_tracebacks()
    look_in(Path.cwd())
    recipe = with_overrides(recipe, overrides)
    take_s3_keys(recipe.store.url)
    check_engines(recipe)  # type: ignore[arg-type]
    check_code(recipe)  # type: ignore[arg-type]
    return recipe


def with_overrides(recipe: R, overrides: str) -> R:
    """The recipe with `section.field=value` fields changed, checked again."""
    if not overrides.strip():
        return recipe
    changed = parse_recipe(apply_overrides(recipe.model_dump(mode="json"), split_overrides(overrides)), recipe.name)
    if not isinstance(changed, type(recipe)):
        raise UserError(f"overrides: flow={changed.flow} cannot turn this into another flow's recipe; run that flow")
    return changed


def split_overrides(overrides: str) -> list[str]:
    """The words of `section.field=value …`; blanks within quotes belong to a word. UserError for an open quote."""
    try:
        return shlex.split(overrides)
    except ValueError as error:
        raise UserError(f"overrides: {error} in {overrides!r}; write section.field=value with blanks between") from None


def run_name(recipe: BaseRecipe, run: str) -> str:
    """`run`, or `<recipe>-<flow run name>`: a flow run that is run again then goes on with its own run."""
    flow_name = flow_run.get_name()
    return run or (f"{recipe.name}-{flow_name}" if flow_name else recipe.name)


def child_recipe(recipe: R, name: str, fork: str) -> tuple[R, Origin | None]:
    """The recipe of a run that shares its parent's history, and where it comes from; as it is for any other run.

    Args:
        fork: `PARENT@ITERATION` for a new child; who continues one that exists need not say it again.

    Raises:
        UserError: there is no such parent, it has not come that far, or the recipe begins with other weights.
    """
    store = open_store(recipe.store.url)
    record = find_record(store, run_record(name), RunRecord)
    origin = read_fork(fork) if fork else origin_of(record) if record and record.kind == "fork" else None
    if origin is None:
        return recipe, None
    parent = load_run(store, origin.parent)
    check_forkable(parent, origin.iteration)
    return inherit_model(parent, origin.iteration, recipe), origin


def execute(
    recipe: Recipe, name: str, origin: Origin | None = None, segments: Sequence[tuple[int, Recipe]] = ()
) -> dict[str, Any]:
    """Build and commit every iteration that the run does not have yet; all engines end when this returns or raises.

    `origin` and `segments` are those of `open_run`.
    """
    return patiently(lambda patience: _start(recipe, name, origin, segments, patience))


def _start(
    recipe: Recipe,
    name: str,
    origin: Origin | None,
    segments: Sequence[tuple[int, Recipe]],
    patience: Patience,
) -> dict[str, Any]:
    """One start of the run: from where it stands to its last iteration."""
    startup = Startup()
    store, ids = open_store(recipe.store.url), PrefectIds(flow_run=flow_run.get_id() or "")
    if origin is None:
        check_inputs(recipe, name)
    recipe, kept = continued(store, name, recipe)
    run = open_run(store, name, recipe.flow, recipe, origin=origin, segments=segments, prefect_flow_run_id=ids.flow_run)
    log = get_run_logger()
    log.info("run %s in %s, start #%d", name, store.url, run.owner)
    if origin is not None:
        log.info("run %s is %s", name, origin)
    if kept:
        log.info("run %s keeps recorded values, whose defaults have changed since: %s", name, settings(kept))
    services = Engines(run, recipe, logs_folder(), generates=not run.record.counterfactual)
    patience.progressed()

    def closed(iteration: IterationResult) -> None:
        patience.progressed()
        services.supervisor.progressed()
        observe(iteration)
        startup(run, iteration, list(services.supervisor.services), ids.flow_run)

    # The log comes last, to have its last line first: a worker kills 7 s after it has asked a flow run to end.
    with (
        Observer(run, recipe) as observe,
        Waits(run, services.watchdog, observe.artifacts),
        Pauses(log, services.watchdog) as pauses,
        services as engines,
        logged(run, ids.flow_run),
    ):
        loop = loop_of(run)(run, recipe, engines, StageTasks(pauses.hold), closed, ids)
        pauses.tell = loop.hold
        loop()
    head = run.head()
    return {"run": name, "store": store.url, "iterations": head.iteration + 1 if head else 0}


def settings(values: Mapping[str, Any]) -> str:
    """Fields and values as overrides are written: `algorithm.minibatches=2, …`."""
    return ", ".join(f"{path}={json.dumps(value)}" for path, value in values.items())


@contextmanager
def logged(run: Run, flow_run_id: str) -> Iterator[None]:
    """Tell in the run's log how this start of the flow begins and how it ends, unless it is killed."""
    note = partial(append, run.store, run.name, prefect_flow_run_id=flow_run_id)
    note("started" if run.owner == 1 else "resumed", standing(run))
    if (newest := run.segments[-1]).n and newest.provenance.owner == run.owner:
        note("extended", {"owner": run.owner, "segment": newest.n, "from_iteration": newest.from_iteration})
    try:
        yield
    except BaseException as error:
        ended = "failed" if isinstance(error, Exception) else ended_as(error, flow_run_id)  # a signal is no Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C: a worker sends SIGTERM
            get_run_logger().info("run %s is interrupted: start it again with run=%s, and it goes on", *[run.name] * 2)
        try:
            note(ended, standing(run) | {"reason": reason})
        except StoreError as unsaid:  # why the run ended says more
            get_run_logger().warning("the run's log could not be written: %s", unsaid)
        raise
    note("finished", standing(run))


def ended_as(error: BaseException, flow_run_id: str) -> str:
    """`suspended`, `cancelled`, or `interrupted`: ended by a signal for another reason, or for one nobody tells."""
    if isinstance(error, Pause):
        return "suspended"
    return ENDS.get(state_type(flow_run_id), "interrupted")


def state_type(flow_run_id: str) -> str:
    """The type of the flow run's state, asked once: its process is about to be killed. Empty if nobody answers."""
    if not PREFECT_API_URL.value() or not flow_run_id:
        return ""
    briefly = get_client(sync_client=True, httpx_settings={"timeout": ASK_TIMEOUT})  # with the keys that settings name
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), briefly as client:
            state = client.read_flow_run(UUID(flow_run_id)).state_type
    except (httpx.HTTPError, ObjectNotFound) as away:
        get_run_logger().warning("cannot tell why this flow run ends: %s", away or type(away).__name__)
        return ""
    return state.value if state else ""


def standing(run: Run) -> dict[str, int | str]:
    """Where a run stands: its owner, how many iterations are committed, and the digest of the last commit."""
    head = run.head()
    return {"owner": run.owner, "iterations": head.iteration + 1 if head else 0, "head": run.digest_of(head)}


def without_traceback(record: logging.LogRecord) -> bool:
    """A logging filter that lets every record pass, those about a `UserError` without their traceback.

    What is wrong is not in the code: in logs a person's mistake is its message.
    """
    if record.exc_info and isinstance(record.exc_info[1], UserError):
        record.exc_info = None
    return True


def hide_tracebacks() -> None:
    """Have Prefect's own log of failed flows and tasks be so too."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(without_traceback)


mark("imports")  # this module is the last that a flow imports, and the one that takes longest
