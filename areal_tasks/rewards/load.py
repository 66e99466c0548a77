"""Loads the verifier that a recipe names."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from areal_tasks.rewards.protocol import Row
from areal_tasks.user_code import import_module, missing_module
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

_FIELD: Final = "reward.verifier"
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
    _search_working_directory()
    found = _attribute(import_module(module_name, _FIELD), attribute, name)
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
        raise missing_module(package, _FIELD, package)


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
