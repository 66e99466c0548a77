"""Runs a flow in this process, against whichever Prefect server there is."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, cast

import httpx
from prefect import Flow
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings, temporary_settings

from flows.cli.machine import START_SECONDS, running
from flows.evaluate import evaluate
from flows.home import home
from flows.rlhf import rlhf
from flows.sft import sft
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe

FLOWS: dict[str, Flow[..., Any]] = {"rlhf": rlhf, "sft": sft, "evaluate": evaluate}


def run_here(recipe: Recipe, name: str, **parameters: Any) -> dict[str, Any]:
    """What the recipe's flow returns. Raises what it raises."""
    return call_flow(FLOWS[recipe.flow], recipe, run=name, **parameters)


def call_flow(flow: Flow[..., Any], *arguments: Any, **parameters: Any) -> dict[str, Any]:
    """What a flow returns that is run in this process. Raises what it raises."""
    with prefect_server():
        check_server()
        return cast("dict[str, Any]", flow(*arguments, **parameters))


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
