"""The `key=value` words after a recipe's name on the command line."""

from __future__ import annotations

from collections.abc import Sequence


def run_and_changes(words: Sequence[str] | None) -> tuple[str, list[str]]:
    """The name in `run=NAME` ("" without one), and the words that change the recipe. The last of a key counts."""
    settings = dict(word.partition("=")[::2] for word in words or [])
    name = settings.pop("run", "")
    return name, [f"{key}={value}" for key, value in settings.items()]
