"""Deployment steps: `prefect deploy` calls the first two, a flow run calls `enter` before its flow is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from arealflow.packages import PACKAGES
from flows.home import add_import_folder
from schemas.errors import UserError
from schemas.recipe.load import load_recipe


def read_recipe(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """`{values, folder}`: every field of the recipe, and the folder to which its relative paths refer."""
    return {"values": load_recipe(name, overrides).model_dump(mode="json"), "folder": str(Path.cwd())}


def this_folder() -> dict[str, str]:
    """`{folder}`: for a deployment without a recipe among its parameters."""
    return {"folder": str(Path.cwd())}


def enter(directory: str, modules: str) -> dict[str, str]:
    """`{directory}`: the flow run's working directory. Rewards and workflows may also be imported from `modules`."""
    for folder in (directory, modules):
        if not Path(folder).is_dir():
            raise UserError(f"{folder} no longer exists: `arealflow deploy` the recipe again from where it is now")
    for package in PACKAGES:
        import_module(package)  # before Prefect imports the flow, for which it searches the current folder first
    add_import_folder(Path(modules))
    return {"directory": directory}
