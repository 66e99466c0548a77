"""Loads users' code by the names in a recipe."""

from __future__ import annotations

import importlib
import os
from typing import Any

from schemas.errors import UserError


def find_object(name: str, field: str) -> Any:
    """The object that a recipe field names as `package.module:object`. UserError if it does not exist."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"{field}: {name} is no `package.module:object`")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{field}: {module} cannot be imported ({error}). Install what is missing, set PYTHONPATH to its folder, "
            f"or put it next to the recipe's file or into the working directory ({os.getcwd()})."
        ) from error
    except Exception as error:
        raise UserError(
            f"{field}: importing {module} fails with {type(error).__name__}: {error}. Correct the module."
        ) from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise UserError(f"{field}: {module} has no {attribute}") from error
