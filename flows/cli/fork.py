"""`arealflow fork`: a run that shares another's history up to an iteration."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.first_start import check_first_start
from areal_tasks.store.fork import Origin, check_forkable, parent_values
from areal_tasks.store.keys import digest_json
from areal_tasks.store.paths import run_record
from areal_tasks.store.runs import load_run
from flows.cli.in_process import run_here
from flows.cli.inspect import AsJson, StoreUrl
from flows.cli.local import outcome
from schemas.recipe.load import apply_overrides, parse_recipe, run_and_changes

Changes = Annotated[
    list[str] | None, typer.Argument(help="section.field=value …, in force from there on; run=NAME names the run.")
]


def fork(
    parent: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run to fork.")],
    at: Annotated[int, typer.Option("--at", min=0, help="First iteration that is the child's own.")],
    overrides: Changes = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Run on from iteration K of a run, with changed settings or without; what came before is shared, not copied."""
    name, changes = run_and_changes(overrides)
    there = load_run(open_store(store), parent)
    check_forkable(there, at)
    recipe = parse_recipe(apply_overrides(parent_values(there, at), changes), parent)
    name = name or child_name(f"{parent}-at-{at}", changes)
    if not there.store.exists(run_record(name)):
        check_first_start(there, Origin(parent, at))  # the flow does too, some seconds later

    origin = Origin(parent, at)
    typer.echo(f"run {name} is {origin}{told(changes)}", err=as_json)
    result = run_here(recipe, name, fork=f"{parent}@{at}")
    typer.echo(json.dumps(result | parentage(origin), default=str, indent=1) if as_json else outcome(result))


def parentage(origin: Origin) -> dict[str, Any]:
    """Where a child comes from, as JSON: `iteration` is its first own one."""
    told = {"kind": origin.kind, "parent": origin.parent, "iteration": origin.iteration}
    if origin.kind == "fork":
        return told
    replayed = {"from": origin.replay_from, "until": origin.replay_until, "counterfactual": origin.counterfactual}
    return told | replayed


def child_name(stem: str, settings: list[str]) -> str:
    """The same name for the same settings, so that the same command again continues the run."""
    return f"{stem}-{digest_json(sorted(settings))[:6]}" if settings else stem


def told(changes: list[str]) -> str:
    """The changes as the end of a sentence."""
    return f", with {' '.join(changes)}" if changes else ", unchanged"
