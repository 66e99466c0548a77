"""`arealflow run`: the flow in this process and this terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_tasks.stages.preflight import check_code, check_engines, check_inputs
from areal_tasks.store.backend import open_store, store_url
from areal_tasks.store.fork import Origin
from flows.cli.deploy import is_file
from flows.cli.in_process import run_recipe
from flows.cli.processes import named_server
from flows.credentials import in_environment, may_be_kept, on_s3
from flows.home import add_import_folder
from schemas.errors import UserError
from schemas.recipe.load import load_recipe, run_and_changes
from schemas.recipe.recipe import Recipe


def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in deployments/, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value …; run=NAME names the run.")
    ] = None,
    store: Annotated[
        str, typer.Option("--store", help="Folder or URL of the store, as store.url; else the recipe's.")
    ] = "",
) -> None:
    """Run a recipe in this process; its services are threads unless launcher.type is given."""
    name, changes = run_and_changes(overrides)
    loaded = in_threads(recipe, [*changes, *in_store(store, changes)])
    if is_file(recipe):
        add_import_folder(Path(recipe).parent)
    check_start(loaded, name)
    result = run_recipe(loaded, name)
    typer.echo(outcome(result))


def check_start(recipe: Recipe, name: str, origin: Origin | None = None) -> None:
    """What the flow checks as it starts, so that Prefect's log does not repeat the UserError. `origin`: of a child."""
    add_import_folder(Path.cwd())
    check_engines(recipe)
    if not on_s3(recipe.store.url) or in_environment() or not (named_server() or may_be_kept()):
        check_inputs(recipe, name, origin)
    check_code(recipe)


def in_store(store: str, changes: Sequence[str]) -> list[str]:
    """`--store` as a change of the recipe. UserError if the changes name another store."""
    if not store:
        return []
    named = [change.removeprefix("store.url=") for change in changes if change.startswith("store.url=")]
    if any(store_url(other) != store_url(store) for other in named):
        raise UserError(f"--store {store} and store.url={named[0]} name two stores: give one of them")
    return [f"store.url={json.dumps(store, ensure_ascii=False)}"]  # JSON is YAML


def in_threads(recipe: str, changes: Sequence[str]) -> Recipe:
    """The recipe, with its services as threads unless a change sets the launcher.

    Raises:
        UserError: the recipe is invalid, or its services need processes.
    """
    loaded = load_recipe(recipe, changes)
    if any(change.startswith(("launcher.type=", "launcher=")) for change in changes):
        return loaded
    try:
        return load_recipe(recipe, ["launcher.type=inline", *changes])
    except UserError as error:
        raise UserError(without_threads(recipe, loaded)) from error


def without_threads(recipe: str, loaded: Recipe) -> str:
    """The error message for a recipe whose services cannot be threads, with what to do instead."""
    return (
        f"`arealflow run` runs services as threads of its own process, and those of {recipe} need processes. Run "
        f"it with `arealflow up {shlex.quote(recipe)}` and `prefect deployment run {loaded.flow}/{Path(recipe).stem}`; "
        f"or here, with launcher.type={loaded.launcher.type}"
    )


def outcome(result: dict[str, Any]) -> str:
    """The message after a run: what is committed where, and the command that reads it."""
    elsewhere = "" if result["store"] == open_store().url else f" --store {shlex.quote(result['store'])}"
    done = f"run {result['run']}: {result['iterations']} iterations in {result['store']}"
    return f"{done}\nread it: arealflow report {result['run']}{elsewhere}"
