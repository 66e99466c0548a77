"""`arealflow run`: the flow in this process and this terminal."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Annotated, Any, cast

import httpx
import typer
from prefect import Flow
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings, temporary_settings

from flows.cli.machine import START_SECONDS, running
from flows.evaluate import evaluate
from flows.home import home
from flows.rlhf import rlhf
from flows.sft import sft
from schemas.errors import UserError
from schemas.recipe.load import load_recipe

FLOWS: dict[str, Flow[..., Any]] = {"rlhf": rlhf, "sft": sft, "evaluate": evaluate}


def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in deployments/, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value …; run=NAME names the run.")
    ] = None,
) -> None:
    """Run a recipe here, its services as threads of this process unless launcher.type says otherwise."""
    settings = dict(item.partition("=")[::2] for item in overrides or [])
    name = settings.pop("run", "")
    changes = [f"{key}={value}" for key, value in ({"launcher.type": "inline"} | settings).items()]
    loaded = load_recipe(recipe, changes)
    with prefect_server():
        check_server()
        result = cast("dict[str, Any]", FLOWS[loaded.flow](loaded, run=name))
    typer.echo(f"run {result['run']}: {result['iterations']} iterations in {result['store']}")


def prefect_server() -> AbstractContextManager[Any]:
    """Where the flow run is recorded: PREFECT_API_URL, else the server of `arealflow up`, else one of this process."""
    machine = running()
    if "PREFECT_API_URL" in os.environ:
        return temporary_settings()
    if machine is not None:
        return temporary_settings(updates={PREFECT_API_URL: machine.api_url})
    folder = home() / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    own = {PREFECT_HOME: folder, "server.ephemeral.startup_timeout_seconds": int(START_SECONDS)}
    return temporary_settings(updates=own, restore_defaults={PREFECT_API_URL})


def check_server() -> None:
    """UserError if a Prefect server is named that does not answer."""
    url = get_current_settings().api.url
    if url is None:
        return
    try:
        httpx.get(f"{url}/health", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        remedy = "Start it, or unset PREFECT_API_URL: then `arealflow run` finds or starts a server itself."
        raise UserError(f"no Prefect server answers at {url}: {error or type(error).__name__}. {remedy}") from error
