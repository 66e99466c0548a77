"""The one exception for what a person can mend: printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a recipe, an argument or the surroundings. The message names the cause and the remedy."""


def shown(names: Iterable[str]) -> str:
    """Names for a message: the first three, and how many there are."""
    ordered = sorted(names)
    more = f", … ({len(ordered)} in all)" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more or "none"
