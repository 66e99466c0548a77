"""Loads users' code by the names in a recipe."""

from __future__ import annotations

import importlib
from typing import Any

from schemas.errors import UserError


def find_object(name: str, field: str) -> Any:
    """The object that a recipe field names as `package.module:object`. UserError if it does not exist."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"{field}: {name} is no `package.module:object`")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UserError(f"{field}: {module} cannot be imported ({error}); is it on PYTHONPATH?") from error
    except AttributeError as error:
        raise UserError(f"{field}: {module} has no {attribute}") from error
