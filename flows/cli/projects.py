"""`arealflow init` and `deploy`: a user's recipe as a folder of files, and as deployments of a Prefect server."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from arealflow.packages import note
from flows.cli.output import echo
from flows.cli.processes import LOGIN, POOL, environment, login_file, needed_server, python, running
from schemas.errors import UserError
from schemas.recipe.load import list_recipes, load_recipe

RECIPE: Final = "recipe.yaml"
FILES: Final = (RECIPE, "my_reward.py", "train.jsonl", "test.jsonl")


def init(folder: Annotated[Path, typer.Argument(help="Folder to write to; created if it does not exist.")]) -> None:
    """Write a commented recipe, a reward function and a small data set that run as they are."""
    try:
        write(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Name another folder") from error
    recipe = shlex.quote(str(folder / RECIPE))
    echo(f"wrote {', '.join(FILES)} in {folder}")
    echo(f"arealflow run {recipe}")
    echo(f"arealflow up {recipe}    # or as a deployment: prints the commands")


def write(folder: Path) -> None:
    """Write the files. Raises UserError if one of them exists, OSError if writing fails."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise UserError(f"{folder} already has {', '.join(existing)}: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = files("flows.cli").joinpath("template", name).read_text(encoding="utf-8")
        (folder / name).write_text(filled(text, folder) if name == RECIPE else text, encoding="utf-8")


def filled(recipe: str, folder: Path) -> str:
    """The recipe template with its placeholders replaced for `folder`."""
    values = {
        "RECIPE_NAME": json.dumps(recipe_name(folder)),  # quoted, so that YAML reads no number
        "RECIPE_FILE": shlex.quote(str(folder / RECIPE)),
    }
    return re.sub("|".join(values), lambda found: values[found[0]], recipe)


def recipe_name(folder: Path) -> str:
    """A recipe name made from the folder's: lower-case letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("._-") or "mine"


Recipes = Annotated[list[str], typer.Argument(metavar="RECIPE…", help="YAML files, or names of shipped recipes.")]


def deploy(recipes: Recipes) -> None:
    """Create deployments from recipes, with a form of their fields: mine.yaml of the flow rlhf becomes rlhf/mine."""
    names = deployment_names(recipes)
    api_url = needed_server()
    warn_of_namesakes()
    deploy_recipes(recipes, api_url)
    print_commands(names, api_url)


def print_commands(names: Sequence[str], api_url: str) -> None:
    """Print the commands, in order, that run these deployments; first the one that gives a shell our server's login."""
    if api_url == running():  # a server of the user's is named in the environment already
        echo(f'export PREFECT_API_URL={api_url} {LOGIN}="$(cat {shlex.quote(str(login_file()))})"')
    for name in names:
        echo(f"prefect deployment run {name}")


def deployment_names(recipes: Sequence[str]) -> list[str]:
    """`FLOW/FILE` for each recipe. UserError if one is invalid, or two would have the same name."""
    names = [f"{load_recipe(recipe).flow}/{Path(recipe).stem}" for recipe in recipes]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"two of these recipes would be the deployment {repeated[0]}: give their files different names")
    return names


def is_file(recipe: str) -> bool:
    """Whether a recipe is the path of a user's file, not the name of a shipped recipe."""
    return recipe not in list_recipes()


def warn_of_namesakes() -> None:
    """Print a note if packages in this folder have the names of arealflow's."""
    if text := note(Path.cwd()):
        echo(f"note: {text}", err=True)


def deploy_all(recipes: Sequence[str], api_url: str) -> None:
    """Deploy the prefect.yaml of this folder, if there is one, and these recipes. UserError as `deploy_recipes`."""
    project_file = Path("prefect.yaml").exists()
    if project_file:
        echo("deploying prefect.yaml")
        prefect(["--no-prompt", "deploy", "--all"], api_url)
    if recipes:
        deploy_recipes(recipes, api_url)
    elif not project_file:
        echo("nothing is deployed: there is no prefect.yaml here, and no recipe is named (arealflow deploy)")


def deploy_recipes(recipes: Sequence[str], api_url: str) -> None:
    """Deploy recipes, to run in the current folder. UserError as from `deployment_names`, or if Prefect fails."""
    names = deployment_names(recipes)
    echo(f"deploying {', '.join(names)}")
    with TemporaryDirectory() as folder:  # in the current folder Prefect would search for our packages first
        (Path(folder) / "prefect.yaml").write_text(json.dumps(project(recipes, names)))  # JSON is YAML
        prefect(["--no-prompt", "deploy", "--all"], api_url, Path(folder))


def prefect(arguments: Sequence[str], api_url: str, folder: Path | None = None) -> None:
    """Run a Prefect command, in another folder if one is given. UserError with its output if it fails."""
    command = [*python("prefect"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(api_url), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"prefect {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def project(recipes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The content of a prefect.yaml for these recipes."""
    current, deployments = Path.cwd(), []
    for recipe, (flow, _, short) in zip(recipes, (name.partition("/") for name in names), strict=True):
        file = Path(os.path.abspath(recipe)) if is_file(recipe) else None
        modules = file.parent if file else current
        deployments.append(
            {
                "name": short,
                "entrypoint": f"flows.{flow}.{flow}",
                "work_pool": {"name": POOL},
                "build": [{"flows.deploy.read_recipe": {"id": "recipe", "name": str(file or recipe)}}],
                "parameters": {"recipe": "{{ recipe.values }}"},
                "pull": [{"flows.deploy.enter": {"directory": str(current), "modules": str(modules)}}],
            }
        )
    return {"name": "arealflow", "deployments": deployments}
