"""`arealflow fork`: starts a run that shares another run's history before an iteration."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.fork import Origin, check_first_start, check_forkable, parent_values
from areal_tasks.store.keys import digest_json
from areal_tasks.store.paths import run_record
from areal_tasks.store.runs import load_run
from flows.cli.in_process import run_recipe
from flows.cli.inspect import AsJson, StoreUrl
from flows.cli.local import check_start, outcome
from schemas.recipe.load import parse_recipe, run_and_changes

Changes = Annotated[
    list[str] | None, typer.Argument(help="section.field=value …, in force from --at on; run=NAME names the run.")
]


def fork(
    parent: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run to fork.")],
    at: Annotated[int, typer.Option("--at", min=0, help="First iteration that is the child's own.")],
    overrides: Changes = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Continue a run from an iteration as a new run, with or without changes; earlier history is shared, not copied."""
    name, changes = run_and_changes(overrides)
    there = load_run(open_store(store), parent)
    check_forkable(there, at)
    recipe, origin = parse_recipe(parent_values(there, at), parent, changes), Origin(parent, at)
    name = name or child_name(f"{parent}-at-{at}", changes)
    if not there.store.exists(run_record(name)):
        check_first_start(there, origin)  # the flow checks it too, some seconds later
    check_start(recipe, name, origin)

    typer.echo(f"run {name} is {origin}{changes_text(changes)}", err=as_json)
    result = run_recipe(recipe, name, fork=f"{parent}@{at}")
    typer.echo(json.dumps(result | parentage(origin), default=str, indent=1) if as_json else outcome(result))


def parentage(origin: Origin) -> dict[str, Any]:
    """A child's origin as values for JSON: `iteration` is its first own one."""
    values = {"kind": origin.kind, "parent": origin.parent, "iteration": origin.iteration}
    if origin.kind == "fork":
        return values
    replayed = {"from": origin.replay_from, "until": origin.replay_until, "counterfactual": origin.counterfactual}
    return values | replayed


def child_name(stem: str, settings: list[str]) -> str:
    """A name that depends only on stem and settings, so that repeating a command resumes its run."""
    return f"{stem}-{digest_json(sorted(settings))[:6]}" if settings else stem


def changes_text(changes: list[str]) -> str:
    """The changes as the end of a sentence."""
    return f", with {' '.join(changes)}" if changes else ", unchanged"
