"""Finds and loads users' code by the names in a recipe."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_tasks.code_digests import digest_of, imported, package_of
from schemas.errors import UserError


def find_object(name: str, field: str) -> Any:
    """The object that a recipe field names as `package.module:object`. UserError if it does not exist."""
    path, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"{field}: {name} is no `package.module:object`")
    module = import_module(path, field)
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        where = getattr(module, "__file__", None) or "built into Python"
        raise UserError(f"{field}: {path} ({where}) has no {attribute!r}") from error


def find_function(
    name: str, field: str, given: Sequence[str], arguments: Mapping[str, Any], optional: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function that a recipe field names, with the recipe's `arguments` bound.

    Args:
        given: names of the positional arguments that it is called with, for messages.
        optional: keyword arguments that are passed on only if it has parameters of these names.

    Raises:
        UserError: it does not exist, is not callable, or does not take these arguments.
    """
    found = find_object(name, field)
    if not callable(found):
        raise UserError(f"{field}: {name} is a {type(found).__name__}, which is not callable")
    signature = inspect.signature(found)
    passed = [key for key in optional if key in signature.parameters and key not in arguments]
    try:
        signature.bind(*given, **dict.fromkeys(passed), **arguments)
    except TypeError as error:
        raise UserError(
            f"{field}: {name}{signature} does not fit: {error}. It is called with ({', '.join(given)}) and "
            f"{field.rpartition('.')[0]}.arguments ({', '.join(arguments) or 'none given'})"
        ) from error
    return lambda *values, **options: found(*values, **{key: options[key] for key in passed}, **arguments)


def import_module(module: str, field: str) -> ModuleType:
    """The module that a recipe field names. UserError if it does not exist, or fails while it is imported."""
    package = package_of(module)
    digest = digest_of(package)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_module(module, field, error.name or module) from error
    except Exception as error:
        raise UserError(
            f"{field}: importing {module} fails with {type(error).__name__}: {error}. "
            f"Try: python -c 'import {module}'{_where(module)}"
        ) from error
    imported(package, digest)
    return found


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
