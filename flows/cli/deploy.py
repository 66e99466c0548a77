"""`arealflow deploy`: recipes become deployments of the running Prefect server, wherever their files are."""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from arealflow.packages import note
from flows.cli import machine
from schemas.errors import UserError
from schemas.recipe.load import list_recipes, load_recipe

Recipes = Annotated[
    list[str], typer.Argument(metavar="RECIPE…", help="YAML files, or names of recipes that come along.")
]


def deploy(recipes: Recipes) -> None:
    """Make recipes deployments, with a form of their fields: mine.yaml of the flow rlhf becomes rlhf/mine."""
    names = deployment_names(recipes)
    if not (api_url := machine.named_server()):
        raise UserError("there is no Prefect server to deploy to: start it with `arealflow up`, or set PREFECT_API_URL")
    tell_of_namesakes()
    deploy_recipes(recipes, api_url)
    tell_commands(names, api_url)


def tell_commands(names: Sequence[str], api_url: str) -> None:
    """Print what runs these deployments from this shell and folder, in the order in which it is to be pasted."""
    if api_url_of_prefect() != api_url:
        typer.echo(f"export PREFECT_API_URL={api_url}")
    for name in names:
        typer.echo(f"prefect deployment run {name}")


def api_url_of_prefect() -> str:
    """The server that the `prefect` command uses in this shell and folder, as far as either names one."""
    if named := os.environ.get("PREFECT_API_URL"):
        return named
    try:
        settings = tomllib.loads(Path("prefect.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return ""
    return str(settings.get("api", {}).get("url", ""))


def deployment_names(recipes: Sequence[str]) -> list[str]:
    """`FLOW/FILE` for each recipe: its flow, and the name of its file without the suffix.

    Raises:
        UserError: a recipe is none, or two would have one name.
    """
    names = [f"{load_recipe(recipe).flow}/{Path(recipe).stem}" for recipe in recipes]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"two of these recipes would be the deployment {twice[0]}: give their files different names")
    return names


def is_file(recipe: str) -> bool:
    """Whether a recipe is a user's file, and not a shipped one of this name."""
    return recipe not in list_recipes()


def tell_of_namesakes() -> None:
    """What to know where packages of this folder have the names of arealflow's."""
    if told := note(Path.cwd()):
        typer.echo(f"note: {told}", err=True)


def deploy_recipes(recipes: Sequence[str], api_url: str) -> None:
    """Deploy them, to run in the current folder. UserError as `deployment_names`, or if Prefect fails."""
    names = deployment_names(recipes)
    typer.echo(f"deploying {', '.join(names)}")
    with TemporaryDirectory() as folder:  # not the current one, in which Prefect would look for our packages first
        (Path(folder) / "prefect.yaml").write_text(json.dumps(project(recipes, names)))  # JSON is YAML
        machine.prefect(["--no-prompt", "deploy", "--all"], api_url, Path(folder))


def project(recipes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """What prefect.yaml would say of these recipes."""
    return {"name": "arealflow", "deployments": [_deployment(*both) for both in zip(recipes, names, strict=True)]}


def _deployment(recipe: str, name: str) -> dict[str, Any]:
    flow, _, short = name.partition("/")
    here = Path.cwd()
    file = Path(os.path.abspath(recipe)) if is_file(recipe) else None
    modules = file.parent if file else here
    return {
        "name": short,
        "entrypoint": f"flows.{flow}.{flow}",
        "work_pool": {"name": machine.POOL},
        "build": [{"flows.deploy.read_recipe": {"id": "recipe", "name": str(file or recipe)}}],
        "parameters": {"recipe": "{{ recipe.values }}"},
        "pull": [{"flows.deploy.enter": {"directory": str(here), "modules": str(modules)}}],
    }
