"""Runs a flow in this process, with the Prefect server that runs or a temporary one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final, cast

import httpx

from areal_tasks.importing import importing
from flows.cli.processes import named_server
from flows.cli.temporary import TemporaryServer
from flows.home import home
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe

#: Modules of services that run as threads of this process.
INLINE: Final = ("areal_tasks.engines.trainer.process", "areal_tasks.engines.embedded.process")


def run_recipe(recipe: Recipe, name: str, **parameters: Any) -> dict[str, Any]:
    """Run the recipe's flow in this process; returns what it returns, raises what it raises."""
    services = INLINE if recipe.launcher.type == "inline" else ()
    return call_flow(recipe.flow, recipe, run=name, imports=services, **parameters)


def call_flow(name: str, *arguments: Any, imports: Sequence[str] = (), **parameters: Any) -> dict[str, Any]:
    """Run the flow `name` in this process; returns what it returns, raises what it raises.

    Imports Prefect, the flow and `imports`, which takes seconds. Without a Prefect server, one starts meanwhile.
    """
    server = None
    if api_url := named_server():
        check_server(api_url)
    else:
        server = TemporaryServer()
        api_url = server.api_url
    with importing():
        flow = getattr(import_module(f"flows.{name}"), name)
        for module in imports:
            import_module(module)
        import_module("flows.startup").mark("imports")
    with prefect_settings(api_url, server is not None):
        if server is not None:
            server.wait()
        return cast("dict[str, Any]", flow(*arguments, **parameters))


def check_server(api_url: str) -> None:
    """UserError if the Prefect server at `api_url` does not answer."""
    try:
        httpx.get(f"{api_url}/health", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        remedy = "Start it, or unset PREFECT_API_URL: then `arealflow run` finds or starts a server itself."
        raise UserError(f"no Prefect server answers at {api_url}: {error or type(error).__name__}. {remedy}") from error


def prefect_settings(api_url: str, temporary: bool) -> AbstractContextManager[Any]:
    """Prefect's settings for a flow recorded by the server at `api_url`; a temporary server has no UI."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_UI_URL, temporary_settings

    own = {PREFECT_HOME: home() / "prefect", PREFECT_UI_URL: ""} if temporary else {}
    return temporary_settings({PREFECT_API_URL: api_url, **own})
