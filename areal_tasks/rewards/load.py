"""Loads the verifier that a recipe names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

from areal_tasks.code_digests import VERIFIER, check_same_code, digest_of, package_of
from areal_tasks.rewards.protocol import Row
from areal_tasks.user_code import find_function, missing_module
from schemas.errors import UserError

#: The built-in verifiers, each with its version, which is raised when its verdicts change.
BUILT_IN: Final = {"math": ("areal_tasks.rewards.math:verify", 4), "exact": ("areal_tasks.rewards.exact:verify", 1)}

#: Passed to a verifier besides prompt, completion and answer, if it has a parameter of that name.
_OPTIONAL: Final = ("truncated", "stop_reason")


def verifier_version(name: str) -> int:
    """The version of a built-in verifier's code; 1 for a user's own, whose version is unknown."""
    return BUILT_IN.get(name, (name, 1))[1]


def load_verifier(name: str, arguments: Mapping[str, Any], code: str = "") -> Callable[[Row], object]:
    """The verifier `name` with its `arguments` bound; modules are also searched in the working directory.

    UserError as of `find_function`, and if its code has another digest than `code` (empty: any is taken).
    """
    _search_working_directory()
    call = find_function(_target(name), VERIFIER, ("prompt", "completion", "answer"), arguments, _OPTIONAL)
    if code:
        check_same_code({VERIFIER: code}, {VERIFIER: digest_of(package_of(name))}, "of a new verifier process")
    return lambda row: call(
        row.prompt, row.completion, row.answer, truncated=row.truncated, stop_reason=row.stop_reason
    )


def check_module(name: str) -> None:
    """UserError if the verifier's package does not exist. Does not import it."""
    package = _target(name).partition(":")[0].partition(".")[0]
    _search_working_directory()
    if find_spec(package) is None:
        raise missing_module(package, VERIFIER, package)


def _target(name: str) -> str:
    """The verifier as `package.module:object`."""
    target = BUILT_IN.get(name, (name, 1))[0]
    if not all(target.partition(":")):
        raise UserError(f"reward.verifier: {name!r} is none of {', '.join(BUILT_IN)}, nor `package.module:object`.")
    return target


def _search_working_directory() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
