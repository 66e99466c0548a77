"""Stage keys: a digest of a stage's code version, recipe values, inputs and seed. Equal keys share a result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas.recipe.fields import before, former_name, is_semantic, leaves

KEY_LENGTH: Final = 32


def recipe_values(recipe: BaseModel, fields: Sequence[str]) -> dict[str, Any]:
    """The semantic values of `recipe` below each of `fields` (`"rollout"`, `"rollout.temperature"`), by dotted path.

    Operational fields are left out, and so is a field that was added later while it has the value that older runs were
    computed with, so that keys that were recorded before stay valid; for the same reason a renamed field has its former
    name. KeyError: one of `fields` does not exist or is operational.
    """
    found = {path: (value, info) for path, value, info in leaves(recipe) if is_semantic(info)}
    values: dict[str, Any] = {}
    for field in fields:
        below = [path for path in found if path == field or path.startswith(f"{field}.")]
        if not below:
            raise KeyError(f"{field} has no semantic field: a key cannot depend on it")
        given = ((path, *found[path]) for path in below)
        values |= {_key_name(path, info): value for path, value, info in given if value != before(info)}
    return values


def _key_name(path: str, info: FieldInfo) -> str:
    section, dot, name = path.rpartition(".")
    return f"{section}{dot}{former_name(info) or name}"


def semantic_values(recipe: BaseModel) -> dict[str, Any]:
    """All semantic values of `recipe`, by dotted path."""
    return {path: value for path, value, info in leaves(recipe) if is_semantic(info)}


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
        previous: for a stage that reads no table (rollout), the digest of the previous commit; of the previous result
            of this stage if it is made before that commit.
    """
    request = {
        "stage": stage,
        "version": version,
        "values": dict(values),
        "inputs": list(inputs),
        "seed": seed,
        "previous": previous,
    }
    return digest_json(request)[:KEY_LENGTH]


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON value; the order of its keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def combine_digests(parts: Mapping[str, str]) -> str:
    """One digest over named digests: of a stage's tables by name, of a folder's files by name."""
    return digest_json(dict(parts))
