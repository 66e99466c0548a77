"""The exception for errors that the user can fix, which is printed without a traceback; and parts of messages."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """An error in a recipe, an argument or the environment. The message names the cause and the remedy."""


def first_line(error: BaseException) -> str:
    """An error in one line: the first of its message that is not blank, else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listed(names: Iterable[str]) -> str:
    """Names for a message: the first three, and the number of all if there are more; `none` without any."""
    ordered = sorted(names)
    more = f", … ({len(ordered)} in all)" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "none"
