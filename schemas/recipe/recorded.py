"""Recipes of recorded runs: fields that were added later are filled in, and a resumed run keeps its values.

Also which fields `arealflow set` may change in a run in progress, and the reasons for refusing others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic.fields import FieldInfo

from schemas.errors import UserError
from schemas.recipe.fields import (
    ALWAYS_THERE,
    Section,
    before,
    former_values,
    is_default,
    is_live,
    is_semantic,
    leaves,
    nested_section,
    with_current_names,
)
from schemas.recipe.load import RECIPES, parse_recipe, set_value
from schemas.recipe.recipe import BaseRecipe

R = TypeVar("R", bound=BaseRecipe)

#: Sections whose semantic fields decide what a group contains.
_OF_GROUPS: Final = ("model", "data", "rollout", "workflow", "reward", "inference")
#: Fields that are live as long as they are positive: what a run does differs too much between 0 and more.
_STAYS_POSITIVE: Final = {
    "rollout.max_head_offpolicyness": "a run is synchronous (0) or asynchronous (above 0) as a whole",
    "evaluation.every": "only a run that evaluates from its start has held-out prompts; a large one is rare",
}


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


# ── changes of a run in progress ──────────────────────────────────────────────────────────────────────────────────────


def live_values(recipe: BaseRecipe) -> dict[str, Any]:
    return {path: value for path, value, info in leaves(recipe) if is_live(info)}


def changes_of(recipe: R, overrides: Sequence[str]) -> dict[str, Any]:
    """The values that `section.field=value` overrides change, by dotted path.

    UserError if a field is not live, which is explained; if the recipe is invalid with them; or if nothing differs.
    """
    values = {path: value for path, value, _ in leaves(recipe)}
    for path, _, value in (override.partition("=") for override in overrides):
        if value.strip() == "0" and values.get(path) and path in _STAYS_POSITIVE:
            raise UserError(_between_0_and_more(path))  # as a recipe it may be invalid, for a reason of no use here
    after = parse_recipe(recipe.model_dump(mode="json"), recipe.name, overrides)
    fields = [(path, value, info) for path, value, info in leaves(after) if values.get(path) != value]
    if refused := [f"  - {why}" for path, value, info in fields if (why := _refusal(path, values, value, info))]:
        raise UserError("\n".join(["a run in progress cannot change this:", *refused]))
    if not fields:
        raise UserError(f"nothing changes: the run has {' '.join(overrides)} already")
    return {path: value for path, value, _ in fields}


def _between_0_and_more(path: str) -> str:
    return f"{path}: cannot change between 0 and more: {_STAYS_POSITIVE[path]}; fork the run instead"


def _refusal(path: str, values: Mapping[str, Any], value: Any, info: FieldInfo) -> str | None:
    if path in _STAYS_POSITIVE and bool(values.get(path)) != bool(value):
        return _between_0_and_more(path)
    one_rank = values.get("trainer.backend") == "local" or values["launcher.type"] == "inline"
    if path in ("trainer.ranks", "trainer.nodes") and one_rank:
        return f"{path}: needs a trainer of several processes: backend fsdp2 or deepspeed, no threads (inline)"
    if is_live(info):
        return None
    if path == "schedule.iterations":
        return f"{path}: resume the run with more, once it has ended: run=NAME {path}={value}"
    if not is_semantic(info):
        return f"{path}: is read when a run starts; give it to the next start of the run"
    if path == "seed" or path.split(".")[0] in _OF_GROUPS:
        return f"{path}: decides what a group contains, and finished groups wait for coming iterations; fork the run"
    return f"{path}: changes what is computed from the same groups; fork the run"
