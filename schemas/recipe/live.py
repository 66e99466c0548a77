"""The fields that `arealflow set` may change in a run in progress, and the reasons for refusing others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic.fields import FieldInfo

from schemas.errors import UserError
from schemas.recipe.fields import is_live, is_semantic, leaves
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import BaseRecipe

R = TypeVar("R", bound=BaseRecipe)

#: Sections whose semantic fields decide what a group contains.
_OF_GROUPS: Final = ("model", "data", "rollout", "workflow", "reward", "inference")
#: Fields that are live as long as they are positive: what a run does differs too much between 0 and more.
_STAYS_POSITIVE: Final = {
    "rollout.max_head_offpolicyness": "a run is synchronous (0) or asynchronous (above 0) as a whole",
    "evaluation.every": "only a run that evaluates from its start has held-out prompts; a large one is rare",
}


def live_values(recipe: BaseRecipe) -> dict[str, Any]:
    """The present values of all live fields, by dotted path."""
    return {path: value for path, value, info in leaves(recipe) if is_live(info)}


def changes_of(recipe: R, overrides: Sequence[str]) -> dict[str, Any]:
    """The values that `section.field=value` overrides change, by dotted path.

    UserError if a field is not live, which is explained; if the recipe is invalid with them; or if nothing differs.
    """
    before = {path: value for path, value, _ in leaves(recipe)}
    for path, _, value in (override.partition("=") for override in overrides):
        if value.strip() == "0" and before.get(path) and path in _STAYS_POSITIVE:
            raise UserError(_between_0_and_more(path))  # as a recipe it may be invalid, for a reason of no use here
    after = parse_recipe(recipe.model_dump(mode="json"), recipe.name, overrides)
    fields = [(path, value, info) for path, value, info in leaves(after) if before.get(path) != value]
    if refused := [f"  - {why}" for path, value, info in fields if (why := _refusal(path, before, value, info))]:
        raise UserError("\n".join(["a run in progress cannot change this:", *refused]))
    if not fields:
        raise UserError(f"nothing changes: the run has {' '.join(overrides)} already")
    return {path: value for path, value, _ in fields}


def _between_0_and_more(path: str) -> str:
    return f"{path}: cannot change between 0 and more: {_STAYS_POSITIVE[path]}; fork the run instead"


def _refusal(path: str, before: Mapping[str, Any], value: Any, info: FieldInfo) -> str | None:
    if path in _STAYS_POSITIVE and bool(before.get(path)) != bool(value):
        return _between_0_and_more(path)
    one_rank = before.get("trainer.backend") == "local" or before["launcher.type"] == "inline"
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
