"""`arealflow init FOLDER`: writes a recipe, a reward function and data that run unchanged, as a starting point."""

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


def init(folder: Annotated[Path, typer.Argument(help="Folder to write to; created if it does not exist.")]) -> None:
    """Write a commented recipe, a reward function and a small data set that run as they are."""
    try:
        write(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Name another folder") from error
    recipe = shlex.quote(str(folder / RECIPE))
    typer.echo(f"wrote {', '.join(FILES)} in {folder}")
    typer.echo(f"arealflow run {recipe}")
    typer.echo(f"arealflow up {recipe}    # or: prints the commands that run it as a deployment")


def write(folder: Path) -> None:
    """Write the files. Raises UserError if one of them exists, OSError if writing fails."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise UserError(f"{folder} holds {', '.join(existing)} already: name another folder")
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
