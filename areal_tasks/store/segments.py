"""A run's recipe is a list of segments, and each is the same recipe except that it lasts longer."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from pydantic import ValidationError

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import find_record
from areal_tasks.store.keys import semantic_values
from schemas.errors import UserError
from schemas.manifest import Segment
from schemas.recipe.recipe import BaseRecipe
from schemas.recipe.recorded import keep_recorded, read_recorded

R = TypeVar("R", bound=BaseRecipe)
Difference = dict[str, tuple[Any, Any]]  # field -> what the run has, what is asked for

_LENGTH: Final = "schedule.iterations"
_NOTHING: Final = "unset"


def read_segments(store: Store, run: str) -> tuple[Segment, ...]:
    """All segments of a run, in order."""
    segments: list[Segment] = []
    while (found := find_record(store, paths.segment(run, len(segments)), Segment)) is not None:
        segments.append(found)
    return tuple(segments)


def continued(store: Store, name: str, recipe: R) -> tuple[R, dict[str, Any]]:
    """`recipe` as it continues the run `name`, which keeps the values that it was begun with where only a default has
    changed since; and what is kept, by dotted path. As it is where there is no such run.
    """
    segments = read_segments(store, name)
    if not segments or segments[-1].recipe.get("flow") != recipe.flow:
        return recipe, {}
    return keep_recorded(recipe, segments[-1].recipe)


def compare(segment: Segment, recipe: BaseRecipe) -> Difference:
    """The semantic fields in which `recipe` differs from the segment's."""
    there, here = semantic_values(_parse(segment, type(recipe))), semantic_values(recipe)
    names = sorted(there.keys() | here.keys())
    pairs = {name: (there.get(name, _NOTHING), here.get(name, _NOTHING)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def extends(difference: Difference) -> bool:
    """Whether all that differs is that more iterations are asked for."""
    return difference.keys() == {_LENGTH} and difference[_LENGTH][1] > difference[_LENGTH][0]


def check_same(name: str, flow_there: str, flow: str, segments: tuple[Segment, ...], recipe: BaseRecipe) -> None:
    """UserError unless `recipe` can continue the run: equal where it is semantic, or longer."""
    if flow_there != flow:
        raise UserError(f"Run {name!r} belongs to the flow {flow_there!r}, not {flow!r}: {_remedy(name)}")
    difference = compare(segments[-1], recipe) if segments else {}
    if difference and not extends(difference):
        listed = "; ".join(
            f"{field} is {there!r} there and {here!r} here" for field, (there, here) in difference.items()
        )
        raise UserError(f"Run {name!r} exists with another recipe: {listed}. {_remedy(name)}")


def _remedy(name: str) -> str:
    return (
        f"Choose another name (run=NAME), or take {name}'s own values to continue it. "
        "Only schedule.iterations may grow."
    )


def _parse(segment: Segment, model: type[BaseRecipe]) -> BaseRecipe:
    try:
        return model.model_validate(read_recorded(segment.recipe))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise UserError(
            f"The run's recipe is not one that this version reads ({where}: {first['msg']}): "
            "continue it with the version that began it, or choose another name (run=NAME)."
        ) from error
