"""`arealflow set`: changes live recipe fields of a run in progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.changes import last_change, request_change, requested_changes
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.record_tables import running_start
from areal_tasks.store.runs import Run, load_run
from flows.cli.output import AsJson, RunName, StoreUrl, echo, print_json, show
from schemas.errors import UserError
from schemas.manifest import Change
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import Recipe
from schemas.recipe.recorded import changes_of, live_values, overrides_text, read_recorded, with_values

Fields = Annotated[list[str] | None, typer.Argument(help="section.field=value …; none: what may change, and changes.")]


def change(run: RunName, fields: Fields = None, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Change a run in progress: servers, workers, pace, η, batch, …; in force from the iteration after next."""
    loaded = load_run(open_store(store), run)
    if not fields:
        show_live(loaded, as_json)
        return
    check_changeable(loaded)
    running = running_start(loaded) is not None
    first = loaded.committed + (2 if running else 0)
    if first >= (loaded.planned or 1):  # an evaluation has one iteration and no schedule
        left = f"run {run} has no iteration left in which a change would be in force"
        raise UserError(f"{left}; resume it with a larger schedule.iterations")
    asked = request(loaded, fields)
    answer = {"run": run, "change": asked.n, "values": asked.values, "from_iteration": first, "running": running}
    print_json(answer) if as_json else echo(outcome(run, asked, first, running))


def check_changeable(run: Run) -> None:
    """UserError for a replay, and for a run without a recipe yet."""
    if run.record.kind == "replay":
        raise UserError(f"run {run.name} is a replay, which has the recipes of {run.record.parent}: fork it instead")
    if not run.segments:
        raise UserError(f"run {run.name} has not begun: give the values with its recipe")


def newest_recipe(run: Run, waiting: Sequence[Change]) -> Recipe:
    """The recipe of the run with all requested changes, except those that the flow, if it runs, has refused."""
    recipe, start = parse_recipe(read_recorded(run.segments[-1].recipe), run.name), running_start(run)
    refused = refusals(run, start.n) if waiting and start else {}
    for one in waiting:
        if one.n not in refused:
            recipe = with_values(recipe, one.values)
    return recipe


def request(run: Run, fields: Sequence[str]) -> Change:
    """Request a change of the run's flow, after those that were requested before. UserError as of `changes_of`."""
    asked = None
    while asked is None:  # else another change has just been asked for, with which this one may not agree
        waiting = list(requested_changes(run.store, run.name, last_change(run.segments)))
        values = changes_of(newest_recipe(run, waiting), fields)
        asked = request_change(run.store, run.name, last_change(run.segments) + len(waiting) + 1, values)
    return asked


def outcome(run: str, change: Change, first: int, running: bool) -> str:
    """The message after a request: from which iteration on the change applies."""
    values = overrides_text(change.values)
    if not running:
        return f"run {run} is not running: {values} from its next start on"
    return f"run {run}: {values} from iteration {first} on, or a later one if iteration {first - 2} ends at this moment"


def show_live(run: Run, as_json: bool) -> None:
    """Print the live fields with their values, and the changes so far with the first iteration of each."""
    check_changeable(run)
    asked = list(requested_changes(run.store, run.name))
    values = live_values(newest_recipe(run, asked[last_change(run.segments) :]))
    states = refusals(run) | {s.change.n: str(s.from_iteration) for s in run.segments if s.change}
    changes = [
        {
            "n": one.n,
            "who": f"{one.user}@{one.host}",
            "when": one.time[:19],
            "what": overrides_text(one.values),
            "from iteration": states.get(one.n, "waits"),
        }
        for one in asked
    ]
    if as_json:
        print_json({"run": run.name, "live": values, "changes": changes})
        return
    show([{"field": path, "value": json.dumps(value)} for path, value in values.items()], False, "may change")
    if changes:
        show(changes, False, "changes so far")


def refusals(run: Run, start: int = 0) -> dict[int, str]:
    """By number of the change, why the last start of the flow that looked at it (or `start`) has not applied it."""
    lines = [line.details for line in read_log(run.store, run.name) if line.action == "refused"]
    asked = [details for details in lines if start in (0, details["owner"])]
    return {int(details["change"]): f"refused: {details['why']}" for details in asked}
