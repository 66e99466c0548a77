"""From a verifier's name in a recipe to the function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from schemas.errors import UserError

BUILT_IN: Final = {"math": "areal_tasks.rewards.math:verify", "exact": "areal_tasks.rewards.exact:verify"}


def load_verifier(name: str, arguments: Mapping[str, Any]) -> Callable[[str, str, str], object]:
    """The verifier `name` with its `arguments` bound; modules are also looked for in the working directory.

    UserError: no such module or object, not callable, or it does not take these arguments.
    """
    module_name, attribute = _target(name)
    found = _attribute(_module(module_name, name), attribute, name)
    if not callable(found):
        raise UserError(f"reward.verifier: {name} is a {type(found).__name__}, not something that can be called.")
    _check_arguments(found, arguments, name)
    return partial(found, **arguments)


def check_module(name: str) -> None:
    """UserError if the verifier's package does not exist. Imports nothing of it."""
    package = _target(name)[0].partition(".")[0]
    _look_here()
    if find_spec(package) is None:
        raise _missing(name, package)


def _target(name: str) -> tuple[str, str]:
    """The module and the object in it."""
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    if not module_name or not attribute:
        raise UserError(f"reward.verifier: {name!r} is none of {', '.join(BUILT_IN)}, nor `package.module:object`.")
    return module_name, attribute


def _look_here() -> None:
    """Have modules found in the working directory, too."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _missing(name: str, module_name: str) -> UserError:
    return UserError(
        f"reward.verifier: {name} cannot be loaded: there is no module {module_name!r}. Install it, or set "
        f"PYTHONPATH to its folder, or start from there (working directory: {os.getcwd()})."
    )


def _module(module_name: str, name: str) -> ModuleType:
    _look_here()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing(name, error.name or module_name) from error
    except Exception as error:
        raise UserError(
            f"reward.verifier: importing {module_name} fails with {type(error).__name__}: {error}. "
            f"Try: python -c 'import {module_name}'"
        ) from error


def _attribute(module: ModuleType, attribute: str, name: str) -> object:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"reward.verifier: {name}: {module.__name__} ({module.__file__}) has no {attribute!r}.")
        found = getattr(found, part)
    return found


def _check_arguments(found: Callable[..., object], arguments: Mapping[str, Any], name: str) -> None:
    signature = inspect.signature(found)
    try:
        signature.bind("prompt", "completion", "answer", **arguments)
    except TypeError as error:
        raise UserError(
            f"reward.verifier: {name}{signature} does not fit: {error}. It is called with (prompt, completion, answer) "
            f"and reward.arguments ({', '.join(arguments) or 'none given'})."
        ) from error
