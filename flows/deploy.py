"""The build step of `prefect.yaml`: turns a recipe's name into the values that a deployment's form shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schemas.recipe.load import load_recipe


def read_recipe(name: str) -> dict[str, Any]:
    """`{values, folder}`: every field of the recipe, and the folder that relative paths in it start from."""
    return {"values": load_recipe(name).model_dump(mode="json"), "folder": str(Path.cwd())}


def this_folder() -> dict[str, str]:
    """`{folder}`: for a deployment whose parameters hold no recipe."""
    return {"folder": str(Path.cwd())}
