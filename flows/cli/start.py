"""`arealflow run`, `fork` and `replay`: a flow in this process and terminal.

The Prefect server that runs records it, else a temporary one.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, cast

import httpx
import typer

from areal_tasks.code_digests import VERIFIER, code_digests
from areal_tasks.garbage import importing
from areal_tasks.stages.preflight import check_code, check_engines, check_inputs
from areal_tasks.store.backend import open_store, store_url
from areal_tasks.store.fork import Origin, ReplayEnd, ReplayStart, check_first_start, check_forkable, parent_values
from areal_tasks.store.keys import digest_json
from areal_tasks.store.paths import run_record
from areal_tasks.store.runs import load_run
from flows.cli import processes
from flows.cli.output import AsJson, Overrides, RecipeName, StoreUrl, echo, print_json, show_compared
from flows.cli.projects import is_file
from flows.credentials import on_s3, set_key_variables
from flows.ending import Once, over
from flows.home import add_import_folder, home
from flows.server import TemporaryServer
from schemas.errors import UserError
from schemas.recipe.load import load_recipe, parse_recipe, run_and_changes
from schemas.recipe.recipe import Recipe

#: Modules of services that run as threads of this process.
INLINE: Final = ("areal_tasks.engines.trainer.process", "areal_tasks.engines.embedded.process")
#: Where a replay that keeps the rollouts runs users' code: the field that names it, and the stage that it begins with.
REJUDGED: Final = (VERIFIER, "verify")


def run_recipe(recipe: Recipe, name: str, **parameters: Any) -> dict[str, Any]:
    """Run the recipe's flow in this process; returns what it returns, raises what it raises."""
    services = INLINE if recipe.launcher.type == "inline" else ()
    return call_flow(recipe.flow, recipe, run=name, imports=services, **parameters)


def call_flow(name: str, *arguments: Any, imports: Sequence[str] = (), **parameters: Any) -> dict[str, Any]:
    """Run the flow `name` in this process; returns what it returns, raises what it raises.

    UserError if the Prefect server refuses this environment's credentials. Imports Prefect, the flow and `imports`,
    which takes seconds. Without a Prefect server, one starts meanwhile.
    """
    server = None
    if api_url := processes.named_server():
        check_server(api_url)
    else:
        server = TemporaryServer()
        api_url = server.api_url
    with importing():
        flow = getattr(import_module(f"flows.{name}"), name)
        for module in imports:
            import_module(module)
        import_module("flows.startup").mark("imports")
    with prefect_settings(api_url, server):
        if server is not None:
            server.wait(processes.START_SECONDS)
        from prefect.exceptions import PrefectHTTPStatusError

        try:
            return cast("dict[str, Any]", flow(*arguments, **parameters))
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in processes.REFUSED:
                raise
            raise UserError(processes.why(api_url, error)) from error
        except BaseException as error:
            over(None, error)
            raise


def check_server(api_url: str) -> None:
    """UserError if the Prefect server at `api_url` does not answer."""
    try:
        httpx.get(f"{api_url}/health", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        remedy = "Start it, or unset PREFECT_API_URL: then `arealflow run` finds or starts a server itself."
        raise UserError(f"no Prefect server answers at {api_url}: {error or type(error).__name__}. {remedy}") from error


def prefect_settings(api_url: str, temporary: TemporaryServer | None) -> AbstractContextManager[Any]:
    """Prefect's settings for a flow recorded by the server at `api_url`; a temporary server has no UI."""
    from prefect.settings import PREFECT_HOME, PREFECT_UI_URL, temporary_settings

    login = temporary.login if temporary else os.environ.get(processes.LOGIN, "")
    own = {PREFECT_HOME: home() / "prefect", PREFECT_UI_URL: ""} if temporary else {}
    return temporary_settings({**processes.client_settings(api_url, login), **own})


def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    store: Annotated[
        str, typer.Option("--store", help="Folder or URL of the store, as store.url; else the recipe's.")
    ] = "",
) -> None:
    """Run a recipe in this process; its services are threads unless launcher.type is given."""
    name, changes = run_and_changes(overrides)
    loaded = load_with_threads(recipe, [*changes, *store_override(store, changes)])
    if is_file(recipe):
        add_import_folder(Path(recipe).parent)
    check_start(loaded, name)
    show = Once(lambda result: echo(outcome(result)))
    show(run_recipe(loaded, name))


def check_start(recipe: Recipe, name: str, origin: Origin | None = None) -> None:
    """What the flow checks as it starts, so that Prefect's log does not repeat the UserError."""
    add_import_folder(Path.cwd())
    check_engines(recipe)
    if not on_s3(recipe.store.url) or set_key_variables() or not prefect_may_have_keys():
        check_inputs(recipe, name, origin)
    check_code(recipe)


def prefect_may_have_keys() -> bool:
    """Whether Prefect may keep S3 keys, which only the flow asks for: a server runs, or there is a database for one."""
    named = processes.named_server() or os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL")
    return bool(named) or (home() / "prefect" / "prefect.db").exists()


def store_override(store: str, changes: Sequence[str]) -> list[str]:
    """`--store` as a change of the recipe. UserError if the changes name another store."""
    if not store:
        return []
    named = [change.removeprefix("store.url=") for change in changes if change.startswith("store.url=")]
    if any(store_url(other) != store_url(store) for other in named):
        raise UserError(f"--store {store} and store.url={named[0]} name two stores: give one of them")
    return [f"store.url={json.dumps(store, ensure_ascii=False)}"]  # JSON is YAML


def load_with_threads(recipe: str, changes: Sequence[str]) -> Recipe:
    """The recipe, with its services as threads unless a change sets the launcher. UserError if they need processes."""
    loaded = load_recipe(recipe, changes)
    if any(change.startswith(("launcher.type=", "launcher=")) for change in changes):
        return loaded
    try:
        return load_recipe(recipe, ["launcher.type=inline", *changes])
    except UserError as error:
        up, deployment = f"arealflow up {shlex.quote(recipe)}", f"{loaded.flow}/{Path(recipe).stem}"
        raise UserError(
            f"`arealflow run` runs services as threads of its own process, and those of {recipe} need processes. Run "
            f"it with `{up}` and `prefect deployment run {deployment}`; or here, with "
            f"launcher.type={loaded.launcher.type}"
        ) from error


def outcome(result: dict[str, Any]) -> str:
    """The message after a run: what is committed where, and the command that reads it."""
    elsewhere = "" if result["store"] == open_store().url else f" --store {shlex.quote(result['store'])}"
    done = f"run {result['run']}: {result['iterations']} iterations in {result['store']}"
    return f"{done}\nread it: arealflow report {result['run']}{elsewhere}"


def fork(
    parent: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run to fork.")],
    at: Annotated[int, typer.Option("--at", min=0, help="First iteration that is the fork's own.")],
    overrides: Overrides = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Continue a run from an iteration as a new run, with or without changes; earlier history is shared, not copied."""
    name, changes = run_and_changes(overrides)
    loaded = load_run(open_store(store), parent)
    check_forkable(loaded, at)
    recipe, origin = parse_recipe(parent_values(loaded, at), parent, changes), Origin(parent, at)
    name = name or derived_name(f"{parent}-at-{at}", changes)
    if not loaded.store.exists(run_record(name)):
        check_first_start(loaded, origin)  # the flow checks it too, some seconds later
    check_start(recipe, name, origin)

    echo(f"run {name} is {origin}{changes_text(changes)}", err=as_json)
    values = origin_values(origin)
    show = Once(lambda made: print_json(made | values) if as_json else echo(outcome(made)))
    show(run_recipe(recipe, name, fork=f"{parent}@{at}"))


def origin_values(origin: Origin) -> dict[str, Any]:
    """A derived run's origin as values for JSON: `iteration` is its first own one."""
    values = {"kind": origin.kind, "parent": origin.parent, "iteration": origin.iteration}
    if origin.kind == "replay":
        values |= {"from": origin.replay_from, "until": origin.replay_until, "counterfactual": origin.counterfactual}
    return values


def derived_name(stem: str, settings: list[str]) -> str:
    """A name that depends only on stem and settings, so that repeating a command resumes its run."""
    return f"{stem}-{digest_json(sorted(settings))[:6]}" if settings else stem


def replay_name(origin: Origin, changes: Sequence[str], recipe: Recipe) -> str:
    """The derived name of a replay with this recipe; another one after an edit of the code that the replay runs."""
    at, generates = f"at {origin.iteration}" if origin.iteration else "", not origin.counterfactual
    settings = [origin.replay_until, at, "on policy" if generates else ""]
    digests = code_digests(recipe.model_dump(mode="json")).items()
    code = [digest for field, digest in digests if generates or (field, origin.replay_from) == REJUDGED]
    return derived_name(f"{origin.parent}-{origin.replay_from}", [*changes, *filter(None, settings), *code])


def changes_text(changes: list[str]) -> str:
    """The changes as the end of a sentence."""
    return f", with {' '.join(changes)}" if changes else ", unchanged"


def replay(
    run: Annotated[str, typer.Argument(help="Name of the run to replay.")],
    start: Annotated[ReplayStart, typer.Option("--from", help="First stage that is built again.")],
    overrides: Overrides = None,
    until: Annotated[
        ReplayEnd, typer.Option("--until", metavar="[verify|advantage]", help="Last stage that is built; default: all.")
    ] = "",
    at: Annotated[int, typer.Option("--at", min=0, help="First iteration that is replayed.")] = 0,
    on_policy: Annotated[bool, typer.Option("--on-policy", help="Generate again where weights differ.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Rebuild only the stages that a change affects, with the recorded rollouts; compare with the original."""
    name, changes = run_and_changes(overrides)
    loaded = load_run(open_store(store), run)
    origin = Origin(run, at, "replay", not on_policy, start, until)
    add_import_folder(Path.cwd())
    name = name or replay_name(origin, changes, parse_recipe(parent_values(loaded, at), run, changes))
    from areal_tasks.stages.replay import replay_segments  # here: it imports torch, as the flow does

    check_start(replay_segments(loaded, origin, name, changes)[-1][1], name, origin)
    echo(f"run {name} is {origin}{changes_text(changes)}", err=as_json)
    show = Once(lambda made: print_comparison(made | origin_values(origin), as_json))
    made = call_flow(
        "replay",
        run,
        start,
        overrides=shlex.join(changes),
        run=name,
        until=until,
        at=at,
        on_policy=on_policy,
        store=loaded.store.url,
    )
    show(made)


def print_comparison(result: dict[str, Any], as_json: bool) -> None:
    """Print the comparison, as tables or JSON."""
    if as_json:
        print_json(result)
        return
    for section in result["comparison"]:
        show_compared(**section)
    echo(f"run {result['run']}: {result['iterations']} iterations in {result['store']}")
