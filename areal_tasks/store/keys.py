"""Keys: the digest of what was asked for. Equal keys are reused, other keys are other files (DESIGN §4)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from schemas.recipe.fields import is_semantic

KEY_LENGTH: Final = 32


def recipe_values(recipe: BaseModel, fields: Sequence[str]) -> dict[str, Any]:
    """The semantic values of `recipe` below each of `fields` (`"rollout"`, `"rollout.temperature"`), by dotted path.

    Operational fields are left out. A field that does not exist, or that is operational itself, is a mistake of the
    stage that names it: KeyError.
    """
    values: dict[str, Any] = {}
    for field in fields:
        found = dict(_leaves(field, *_descend(recipe, field)))
        if not found:
            raise KeyError(f"{field} has no semantic field: a key cannot depend on it")
        values |= found
    return values


def semantic_values(recipe: BaseModel) -> dict[str, Any]:
    """All semantic values of `recipe`, by dotted path."""
    return {k: v for name in type(recipe).model_fields for k, v in _leaves(name, *_descend(recipe, name))}


def _descend(recipe: BaseModel, field: str) -> tuple[Any, bool]:
    """The value at a dotted path and whether that field is marked semantic."""
    value: Any = recipe
    marked = False
    for name in field.split("."):
        if not isinstance(value, BaseModel):
            raise KeyError(f"{field}: there is nothing below a plain value")
        marked = is_semantic(type(value).model_fields[name])
        value = getattr(value, name)
    return value, marked


def _leaves(path: str, value: Any, marked: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(f"{path}.{name}", *_descend(value, name))
    elif marked:
        yield path, value


def stage_key(
    stage: str,
    version: int,
    values: Mapping[str, Any],
    inputs: Sequence[str],
    seed: int,
    previous: str | None = None,
) -> str:
    """The key of a stage's result.

    Args:
        version: of the stage's code: raised when the same inputs would give another result.
        values: semantic recipe values it reads (`recipe_values`).
        inputs: content digests of what it reads, in the order it names them.
        previous: digest of the previous commit, for a stage that reads no table (rollout).
    """
    asked = {
        "stage": stage,
        "version": version,
        "values": dict(values),
        "inputs": list(inputs),
        "seed": seed,
        "previous": previous,
    }
    return digest_json(asked)[:KEY_LENGTH]


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def combine_digests(parts: Mapping[str, str]) -> str:
    """One digest over named digests: of a stage's tables by name, of a folder's files by name."""
    return digest_json(dict(parts))
