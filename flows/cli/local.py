"""`arealflow run`: the flow in this process and this terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from areal_tasks.stages.preflight import check_engines, check_inputs
from flows.cli.in_process import run_here
from flows.cli.overrides import run_and_changes
from flows.credentials import in_environment, on_s3
from flows.home import look_in
from schemas.recipe.load import list_recipes, load_recipe


def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in deployments/, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value …; run=NAME names the run.")
    ] = None,
) -> None:
    """Run a recipe here, its services as threads of this process unless launcher.type says otherwise."""
    name, changes = run_and_changes(overrides)
    loaded = load_recipe(recipe, ["launcher.type=inline", *changes])
    if recipe not in list_recipes():
        look_in(Path(recipe).parent)
    check_engines(loaded)
    if not on_s3(loaded.store.url) or in_environment():  # else the Prefect server may have keys
        check_inputs(loaded, name)
    result = run_here(loaded, name)
    typer.echo(outcome(result))


def outcome(result: dict[str, Any]) -> str:
    """Where a run stands now, for a person."""
    return f"run {result['run']}: {result['iterations']} iterations in {result['store']}"
