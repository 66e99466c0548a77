"""Recipes of recorded runs: fields that were added later are filled in, and a resumed run keeps its values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from schemas.recipe.fields import (
    ALWAYS_THERE,
    Section,
    before,
    former_values,
    is_default,
    leaves,
    nested_section,
    with_current_names,
)
from schemas.recipe.load import RECIPES, parse_recipe, set_value
from schemas.recipe.recipe import BaseRecipe

R = TypeVar("R", bound=BaseRecipe)


def read_recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of a recorded recipe, under today's names, with the fields that it lacks as added later.

    Each of the latter gets the value that the run was computed with (`before` in its declaration), not today's default.
    Every reader of recorded recipes must call this. A recipe of an unknown flow is returned unchanged.
    """
    model = RECIPES.get(str(values.get("flow")))
    return dict(values) if model is None else _filled(values, model)


def keep_recorded(recipe: R, recorded: Mapping[str, Any]) -> tuple[R, dict[str, Any]]:
    """The recipe with which to continue the run of `recorded`, and the values kept from that, by dotted path.

    A field keeps its recorded value if `recipe` has today's default and the run was started with a former one: they
    differ only because the default has changed, or the field was added, since. All other fields are as in `recipe`.
    UserError if it is inconsistent with these values.
    """
    known = read_recorded(recorded)
    kept = {
        path: former
        for path, value, info in leaves(recipe)
        if is_default(info, value) and (former := value_at(known, path)) != value and former in former_values(info)
    }
    if not kept:
        return recipe, {}
    return with_values(recipe, kept), kept


def with_values(recipe: R, values: Mapping[str, Any]) -> R:
    """The recipe with these values, by dotted path. UserError if it is inconsistent with them."""
    nested = recipe.model_dump(mode="json")
    for path, value in values.items():
        set_value(nested, path.split("."), value, path)
    found = parse_recipe(nested, recipe.name)
    assert isinstance(found, type(recipe)), "the flow is the same"
    return found


def overrides_text(values: Mapping[str, Any]) -> str:
    """Fields and values in the form of overrides: `algorithm.minibatches=2, …`."""
    return ", ".join(f"{path}={json.dumps(value)}" for path, value in values.items())


def _filled(values: Mapping[str, Any], model: type[Section]) -> dict[str, Any]:
    result = with_current_names(values, model)
    for name, info in model.model_fields.items():
        part, given = nested_section(info), result.get(name, {} if info.default_factory else None)
        if part is None and name not in result and before(info) is not ALWAYS_THERE:
            result[name] = before(info)
        elif part is not None and isinstance(given, Mapping) and (filled := _filled(given, part)):
            result[name] = filled
    return result


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of nested values; None if there is none."""
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
