"""A run's recipe as a list of segments, each of which is the same recipe with more iterations."""

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
Difference = dict[str, tuple[Any, Any]]  # field -> the run's value, the recipe's value

_LENGTH: Final = "schedule.iterations"
_NOTHING: Final = "unset"


def read_segments(store: Store, run: str) -> tuple[Segment, ...]:
    """All segments of a run, in order."""
    segments: list[Segment] = []
    while (found := find_record(store, paths.segment(run, len(segments)), Segment)) is not None:
        segments.append(found)
    return tuple(segments)


def continued(store: Store, name: str, recipe: R) -> tuple[R, dict[str, Any]]:
    """`recipe` for continuing the run `name`, with the run's recorded values where only a default has changed since;
    and those values, by dotted path. Unchanged if there is no such run.
    """
    segments = read_segments(store, name)
    if not segments or segments[-1].recipe.get("flow") != recipe.flow:
        return recipe, {}
    return keep_recorded(recipe, segments[-1].recipe)


def compare(segment: Segment, recipe: BaseRecipe) -> Difference:
    """The semantic fields in which `recipe` differs from the segment's."""
    recorded, given = semantic_values(_parse(segment, type(recipe))), semantic_values(recipe)
    names = sorted(recorded.keys() | given.keys())
    pairs = {name: (recorded.get(name, _NOTHING), given.get(name, _NOTHING)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def extends(difference: Difference) -> bool:
    """Whether the recipe differs only by more iterations."""
    return difference.keys() == {_LENGTH} and difference[_LENGTH][1] > difference[_LENGTH][0]


def check_same(name: str, run_flow: str, flow: str, segments: tuple[Segment, ...], recipe: BaseRecipe) -> None:
    """UserError unless `recipe` can continue the run: equal semantic fields, or only more iterations."""
    if run_flow != flow:
        raise UserError(f"Run {name!r} belongs to the flow {run_flow!r}, not {flow!r}: {_remedy(name)}")
    difference = compare(segments[-1], recipe) if segments else {}
    if difference and not extends(difference):
        listed = "; ".join(
            f"{field} is {recorded!r} in the run and {given!r} here" for field, (recorded, given) in difference.items()
        )
        raise UserError(f"Run {name!r} exists with another recipe: {listed}. {_remedy(name)}")


def _remedy(name: str) -> str:
    return (
        f"Choose another name (run=NAME), or use {name}'s own values to continue it. Only schedule.iterations may grow."
    )


def _parse(segment: Segment, model: type[BaseRecipe]) -> BaseRecipe:
    try:
        return model.model_validate(read_recorded(segment.recipe))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise UserError(
            f"This version cannot read the run's recipe ({where}: {first['msg']}): "
            "continue it with the version that began it, or choose another name (run=NAME)."
        ) from error
