"""Code shared by the flows: from a recipe to a run with all its iterations committed.

A run is restarted in the same process while its store or an engine is unavailable, with new services and a new owner;
what is committed is reused. A store that is unreachable at the flow run's first request is more likely a mistake, and
reported immediately. A start whose iteration an earlier start has committed (`HeadMoved`) is restarted in the same way.
A run that another process has started meanwhile is left to that one.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import Abort, ObjectNotFound, Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.processes import keep_loopback_direct
from areal_tasks.stages.build import PrefectIds
from areal_tasks.stages.jobs import IterationResult
from areal_tasks.stages.preflight import check_code, check_engines, check_inputs
from areal_tasks.stages.replay import loop_of
from areal_tasks.store.backend import StoreError, Unavailable
from areal_tasks.store.fork import Origin, read_fork
from areal_tasks.store.history.journal import CODE, append_log, code_of_last_start
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import HeadMoved, Run
from flows.background import ServiceLogs, ServiceSamples
from flows.credentials import load_s3_keys
from flows.ending import impatient_client
from flows.home import add_import_folder, logs_folder
from flows.observe import Observer
from flows.pauses import Pauses
from flows.startup import Startup, mark, start_timing
from flows.tasks import StageTasks
from flows.waits import Waits
from schemas.errors import UserError
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import BaseRecipe, Recipe
from schemas.recipe.recorded import overrides_text

R = TypeVar("R", bound=BaseRecipe)
T = TypeVar("T")

#: How the log names the end of a flow process by a signal, by the type of the flow run's state.
ENDS: Final[Mapping[StateType | None, str]] = {
    StateType.CANCELLING: "cancelled",
    StateType.CANCELLED: "cancelled",
    StateType.PAUSED: "suspended",
}
RESTARTED_AFTER: Final = (Unavailable, TrainerDown, ServerDown, HeadMoved)
#: How long a flow retries after its first failure since a commit, however often it opens the run meanwhile.
WAIT_SECONDS: Final = 600.0
LONGEST_PAUSE_SECONDS: Final = 15.0


def prepare(recipe: R, run: str, overrides: str, fork: str = "") -> tuple[R, str, Origin | None]:
    """What `execute` takes: the recipe with its overrides, the name of the run, and for a new fork its origin.

    The name is that of the flow run (`run_name`), so that a retried flow run resumes its own run. UserError if the
    recipe cannot be used here.
    """
    begin_flow()
    recipe = with_overrides(recipe, overrides)
    load_s3_keys(recipe.store.url)
    check_engines(recipe)  # type: ignore[arg-type]
    check_code(recipe)  # type: ignore[arg-type]
    name = run or flow_run.get_name() or recipe.name
    return recipe, name, read_fork(fork) if fork else None


def run_name() -> str:
    """The name of a flow run and of its run: the parameter `run`, or the recipe's or original's and a random one."""
    given, name = flow_run.get_parameters(), flow_run.get_name() or ""
    recipe = given.get("recipe")
    stem = given["original"] if recipe is None else recipe["name"] if isinstance(recipe, dict) else recipe.name
    return given.get("run") or (name if name.startswith(f"{stem}-") else f"{stem}-{name}")  # a retry has it already


def begin_flow() -> None:
    """Time the flow, hide tracebacks of user errors, and allow imports from the current folder."""
    keep_loopback_direct()
    start_timing(nested=flow_run.get_parent_flow_run_id() is not None)
    for logger in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(logger).addFilter(drop_traceback)
    add_import_folder(Path.cwd())


def with_overrides(recipe: R, overrides: str) -> R:
    """The recipe with `section.field=value` overrides applied, validated again."""
    if not overrides.strip():
        return recipe
    changed = parse_recipe(recipe.model_dump(mode="json"), recipe.name, split_overrides(overrides))
    if not isinstance(changed, type(recipe)):
        raise UserError(f"overrides: flow={changed.flow} cannot turn this into another flow's recipe; run that flow")
    return changed


def split_overrides(overrides: str) -> list[str]:
    """The words of `section.field=value …`; quoted blanks do not separate words. UserError for an open quote."""
    try:
        return shlex.split(overrides)
    except ValueError as error:
        raise UserError(f"overrides: {error} in {overrides!r}; write section.field=value separated by blanks") from None


class RestartBudget:
    """Counts failures since the last commit. `known`: the store has answered before, so that retries make sense."""

    def __init__(self, known: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.known = known
        self.clock = clock
        self.failures = 0
        self.until = 0.0  # after the first failure: when retries end
        self.committed: int | None = None  # how many iterations were, when the run was looked at last
        self.claims: set[str] = set()  # of the run, by this process's starts

    def saw(self, committed: int) -> None:
        """The store answered: so many iterations of the run are committed. More than before are progress."""
        if self.committed is not None and committed > self.committed:
            self.failures = 0
        self.known, self.committed = True, committed

    def pause(self, error: Exception) -> float:
        """Seconds until the next retry: 1, 2, 4, … Raises `error` when retries are over or make no sense."""
        self.until = self.until if self.failures else self.clock() + WAIT_SECONDS
        if not self.known or self.clock() > self.until:
            raise error
        self.failures += 1
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.failures - 1))


def with_restarts(work: Callable[[RestartBudget], T]) -> T:
    """Call `work`, retrying while it raises an error of RESTARTED_AFTER; returns its result, raises other errors."""
    budget = RestartBudget(known=flow_run.get_run_count() > 1)
    while True:
        try:
            return work(budget)
        except RESTARTED_AFTER as error:
            seconds = budget.pause(error)
            again = "%s Trying again in %g s, for at most %g s without a commit."
            get_run_logger().warning(again, error, seconds, WAIT_SECONDS)
            time.sleep(seconds)


def execute(
    recipe: Recipe, name: str, origin: Origin | None = None, segments: Sequence[tuple[int, Recipe]] = ()
) -> dict[str, Any]:
    """Build and commit every iteration that the run lacks; engines have ended then. See also `open_run`.

    Raises Abort in place of an error, so that Prefect records no end of the flow run, if another process runs it again.
    """
    try:
        return with_restarts(lambda budget: _start(recipe, name, origin, segments, budget))
    except Exception as error:
        recorded = read_flow_run(flow_run.get_id() or "")
        if recorded is None or recorded.run_count <= flow_run.get_run_count():
            raise
        get_run_logger().error("%s\nThis flow run is in another process, and goes on there.", error)
        raise Abort(str(error)) from error


def _start(
    recipe: Recipe, name: str, origin: Origin | None, segments: Sequence[tuple[int, Recipe]], budget: RestartBudget
) -> dict[str, Any]:
    """One start of the run: from its last commit to its last iteration."""
    startup, flow_run_id = Startup(), flow_run.get_id() or ""
    checked = check_inputs(recipe, name, origin)
    recipe, stored, log = checked.recipe, checked.stored, get_run_logger()
    store = stored.store
    run = open_run(
        store,
        name,
        recipe,
        segments=segments,
        prefect_flow_run_id=flow_run_id,
        stored=stored,
        claims=budget.claims,
    )
    log.info("run %s in %s, start #%d", name, store.url, run.owner)
    if stored.origin is not None:
        log.info("run %s is %s", name, stored.origin)
    if kept := checked.kept:
        log.info("run %s keeps its recorded values, whose defaults have changed since: %s", name, overrides_text(kept))
    if changed := stored.changed:
        log.info("run %s keeps what `arealflow set` has changed: %s", name, overrides_text(changed))
    services = Engines(run, recipe, logs_folder(), generates=not run.record.counterfactual)
    budget.saw(run.committed)

    def closed(iteration: IterationResult) -> None:
        budget.saw(iteration.iteration + 1)
        services.supervisor.progressed()
        observe(iteration)
        startup(run, iteration, list(services.supervisor.services), flow_run_id)

    # `log_start_and_end` comes last, so that it exits first: the worker kills a flow run 7 s after asking it to end.
    with (
        Observer(run, recipe) as observe,
        Waits(run, services.watchdog, observe.artifacts, log),
        ServiceLogs(run, logs_folder(), log),
        Pauses(log, services.watchdog) as pauses,
        services as engines,
        ServiceSamples(engines, log),
        log_start_and_end(run, flow_run_id, services.code),
    ):
        loop = loop_of(run)(run, recipe, engines, StageTasks(pauses.wait_while_paused), closed, PrefectIds(flow_run_id))
        pauses.on_stopping = loop.hold
        loop()
    return {"run": name, "store": store.url, "iterations": run.committed}


@contextmanager
def log_start_and_end(run: Run, flow_run_id: str, code: Mapping[str, str]) -> Iterator[None]:
    """Write to the run's log how this start of the flow begins and, unless it is killed, how it ends.

    `code`: digests of the users' code. What has changed since the last start is a line of its own.
    """
    note = partial(append_log, run.store, run.name, prefect_flow_run_id=flow_run_id)
    before = code_of_last_start(run.store, run.name) if code else {}
    note("started" if run.owner == 1 else "resumed", run_state(run) | {CODE + name: code[name] for name in code})
    if edited := {name: f"{code[name]}, before {old}" for name, old in before.items() if code.get(name, old) != old}:
        note("code changed", {"owner": run.owner, "from_iteration": run.committed, **edited})
        changed = (
            "the code of %s has changed since the last start: it makes what is not committed, from iteration %d on"
        )
        get_run_logger().info(changed, ", ".join(edited), run.committed)
    if (newest := run.segments[-1]).n and newest.provenance.owner == run.owner:
        note("extended", {"owner": run.owner, "segment": newest.n, "from_iteration": newest.from_iteration})
    try:
        yield
    except BaseException as error:
        by_signal = not isinstance(error, Exception)
        ended = ending_action(error, flow_run_id) if by_signal else "failed"
        reason = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:500]
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C; the worker sends SIGTERM
            get_run_logger().info("run %s is interrupted: start it again with run=%s to resume it", *[run.name] * 2)
        try:
            note(ended, run_state(run) | {"reason": reason})
        except StoreError as unwritten:  # `error` matters more: it is raised below
            get_run_logger().warning("the run's log could not be written: %s", unwritten)
        raise
    note("finished", run_state(run))


def ending_action(error: BaseException, flow_run_id: str) -> str:
    """`suspended`, `cancelled`, or `interrupted` (a signal for any other or an unknown reason)."""
    if isinstance(error, Pause):
        return "suspended"
    recorded = read_flow_run(flow_run_id)
    return ENDS.get(recorded.state_type if recorded else None, "interrupted")


def read_flow_run(flow_run_id: str) -> FlowRun | None:
    """The flow run on the server; None if that does not answer. One request: the process ends soon."""
    if not PREFECT_API_URL.value() or not flow_run_id:
        return None
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), impatient_client() as client:
            return cast("FlowRun", client.read_flow_run(UUID(flow_run_id)))
    except (httpx.HTTPError, ObjectNotFound) as away:
        get_run_logger().warning("cannot find out why this flow run ends: %s", away or type(away).__name__)
        return None


def run_state(run: Run) -> dict[str, int | str]:
    committed = run.committed
    return {"owner": run.owner, "iterations": committed, "head": run.digest_before(committed)}


def drop_traceback(record: logging.LogRecord) -> bool:
    """A logging filter that passes every record, those of a `UserError` without traceback: the code is not at fault."""
    if record.exc_info and isinstance(record.exc_info[1], UserError):
        record.exc_info = None
    return True


mark("imports")  # a flow imports this module last, and it takes longest
