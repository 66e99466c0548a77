"""`arealflow init FOLDER`: a recipe, a reward function and data that run as they are, to be changed step by step."""

from __future__ import annotations

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from schemas.errors import UserError

RECIPE: Final = "recipe.yaml"
FILES: Final = (RECIPE, "my_reward.py", "train.jsonl", "test.jsonl")


def init(folder: Annotated[Path, typer.Argument(help="Folder to write to; made if it is not there.")]) -> None:
    """Write a commented recipe, a reward function and a small data set that run as they are."""
    try:
        write(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Name another folder") from error
    recipe = shlex.quote(str(folder / RECIPE))
    typer.echo(f"wrote {', '.join(FILES)} in {folder}")
    typer.echo(f"arealflow run {recipe}")
    typer.echo(f"arealflow up {recipe}    # or so: prints the commands that run it as a deployment")


def write(folder: Path) -> None:
    """The files, none of which may be there. Raises UserError if one is, OSError as the disk does."""
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise UserError(f"{folder} holds {' and '.join(there)} already: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = files("flows.cli").joinpath("template", name).read_text(encoding="utf-8")
        (folder / name).write_text(filled(text, folder) if name == RECIPE else text, encoding="utf-8")


def filled(recipe: str, folder: Path) -> str:
    """The recipe of this folder."""
    values = {
        "RECIPE_NAME": json.dumps(recipe_name(folder)),  # JSON is YAML, and no text of it is taken for a number
        "RECIPE_FILE": shlex.quote(str(folder / RECIPE)),
    }
    return re.sub("|".join(values), lambda found: values[found[0]], recipe)


def recipe_name(folder: Path) -> str:
    """The folder's name as a recipe's: lower-case letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("._-") or "mine"
