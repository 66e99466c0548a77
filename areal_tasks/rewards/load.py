"""Loads the verifier that a recipe names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from areal_tasks.rewards.protocol import Row
from schemas.errors import UserError


@dataclass(frozen=True)
class BuiltIn:
    """A built-in verifier. `version` is raised when its verdicts change."""

    target: str
    version: int = 1


BUILT_IN: Final = {
    "math": BuiltIn("areal_tasks.rewards.math:verify", version=3),
    "exact": BuiltIn("areal_tasks.rewards.exact:verify"),
}

#: Passed to a verifier besides prompt, completion and answer, if it has a parameter of that name.
_OPTIONAL: Final = ("truncated", "stop_reason")


def verifier_version(name: str) -> int:
    """The version of a built-in verifier's code; 1 for a user's own, whose version is unknown."""
    return BUILT_IN[name].version if name in BUILT_IN else 1


def load_verifier(name: str, arguments: Mapping[str, Any]) -> Callable[[Row], object]:
    """The verifier `name` with its `arguments` bound; modules are also searched in the working directory.

    UserError: no such module or object, not callable, or it does not take these arguments.
    """
    module_name, attribute = _target(name)
    found = _attribute(_module(module_name, name), attribute, name)
    if not callable(found):
        raise UserError(f"reward.verifier: {name} is a {type(found).__name__}, which is not callable.")
    optional = [part for part in _OPTIONAL if part in inspect.signature(found).parameters and part not in arguments]
    _check_arguments(found, optional, arguments, name)

    def judge(row: Row) -> object:
        given = {part: getattr(row, part) for part in optional}
        return found(row.prompt, row.completion, row.answer, **given, **arguments)

    return judge


def check_module(name: str) -> None:
    """UserError if the verifier's package does not exist. Does not import it."""
    package = _target(name)[0].partition(".")[0]
    _search_working_directory()
    if find_spec(package) is None:
        raise _missing(name, package)


def _target(name: str) -> tuple[str, str]:
    """The module and the object in it."""
    module_name, _, attribute = (BUILT_IN[name].target if name in BUILT_IN else name).partition(":")
    if not module_name or not attribute:
        raise UserError(f"reward.verifier: {name!r} is none of {', '.join(BUILT_IN)}, nor `package.module:object`.")
    return module_name, attribute


def _search_working_directory() -> None:
    """Add the working directory to the module search path."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _missing(name: str, module_name: str) -> UserError:
    return UserError(
        f"reward.verifier: {name} cannot be loaded: there is no module {module_name!r}. Install it, or set "
        f"PYTHONPATH to its folder, or put it next to the recipe's file or into the working directory ({os.getcwd()})."
    )


def _module(module_name: str, name: str) -> ModuleType:
    _search_working_directory()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing(name, error.name or module_name) from error
    except Exception as error:
        raise UserError(
            f"reward.verifier: importing {module_name} fails with {type(error).__name__}: {error}. "
            f"Try: python -c 'import {module_name}'{_where(module_name)}"
        ) from error


def _where(module_name: str) -> str:
    """The folder to start from so that Python finds the module, if it is not the working directory."""
    spec = find_spec(module_name.partition(".")[0])
    if spec is None or not spec.origin:
        return ""
    folder = Path(spec.origin).parent.parent if spec.submodule_search_locations else Path(spec.origin).parent
    return "" if folder == Path.cwd() else f", in the folder {folder}"


def _attribute(module: ModuleType, attribute: str, name: str) -> object:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"reward.verifier: {name}: {module.__name__} ({module.__file__}) has no {attribute!r}.")
        found = getattr(found, part)
    return found


def _check_arguments(
    found: Callable[..., object], optional: Sequence[str], arguments: Mapping[str, Any], name: str
) -> None:
    signature = inspect.signature(found)
    try:
        signature.bind("prompt", "completion", "answer", **dict.fromkeys(optional), **arguments)
    except TypeError as error:
        raise UserError(
            f"reward.verifier: {name}{signature} does not fit: {error}. It is called with (prompt, completion, answer) "
            f"and reward.arguments ({', '.join(arguments) or 'none given'})."
        ) from error
