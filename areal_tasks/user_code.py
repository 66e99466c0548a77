"""Loads users' code by the names in a recipe."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import UserError


def find_object(name: str, field: str) -> Any:
    """The object that a recipe field names as `package.module:object`. UserError if it does not exist."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"{field}: {name} is no `package.module:object`")
    try:
        return getattr(import_module(module, field), attribute)
    except AttributeError as error:
        raise UserError(f"{field}: {module} has no {attribute}") from error


def import_module(module: str, field: str) -> ModuleType:
    """The module that a recipe field names. UserError if it does not exist, or fails while it is imported."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_module(module, field, error.name or module) from error
    except Exception as error:
        raise UserError(
            f"{field}: importing {module} fails with {type(error).__name__}: {error}. "
            f"Try: python -c 'import {module}'{_where(module)}"
        ) from error


def missing_module(module: str, field: str, missing: str) -> UserError:
    """The error for a module that a recipe field names: it, or one that it imports, is `missing`."""
    return UserError(
        f"{field}: {module} cannot be imported: there is no module {missing!r}. Install it, or set PYTHONPATH to its "
        f"folder, or put it next to the recipe's file or into the working directory ({os.getcwd()})."
    )


def _where(module: str) -> str:
    """The folder to start from so that Python finds the module, if it is not the working directory."""
    spec = find_spec(module.partition(".")[0])
    if spec is None or not spec.origin:
        return ""
    folder = Path(spec.origin).parent.parent if spec.submodule_search_locations else Path(spec.origin).parent
    return "" if folder == Path.cwd() else f", in the folder {folder}"
