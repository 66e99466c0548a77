"""Steps of deployments: what `prefect deploy` does with a recipe, and a flow run before its flow is loaded."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from arealflow.packages import PACKAGES
from flows.home import look_in
from schemas.errors import UserError
from schemas.recipe.load import load_recipe


def read_recipe(name: str) -> dict[str, Any]:
    """`{values, folder}`: every field of the recipe, and the folder that relative paths in it start from."""
    return {"values": load_recipe(name).model_dump(mode="json"), "folder": str(Path.cwd())}


def this_folder() -> dict[str, str]:
    """`{folder}`: for a deployment whose parameters hold no recipe."""
    return {"folder": str(Path.cwd())}


def enter(directory: str, modules: str) -> dict[str, str]:
    """`{directory}`, in which the flow run goes on; rewards and workflows are also looked for in `modules`.

    Raises:
        UserError: one of the folders is not there.
    """
    for folder in (directory, modules):
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is not there any more: `arealflow deploy` the recipe again from where it is now")
    for package in PACKAGES:
        import_module(package)  # before Prefect looks for the flow, which it does in the current folder first
    look_in(Path(modules))
    return {"directory": directory}
