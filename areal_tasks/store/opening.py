"""The state of a run in the store when its flow starts, read once, and whether a recipe may continue the run.

A run's recipe is a list of segments: each is the same recipe with more iterations, or with a change by `arealflow set`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.changes import changed_fields
from areal_tasks.store.commit import checked_last_number, find_record, missing_before, read_record, records_from
from areal_tasks.store.fork import Origin, check_origin, origin_of
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.retention.tombstones import check_run_kept
from schemas.errors import UserError
from schemas.manifest import IterationCommit, RunRecord, Segment
from schemas.recipe.recipe import BaseRecipe
from schemas.recipe.recorded import keep_recorded, read_recorded, value_at, with_values

R = TypeVar("R", bound=BaseRecipe)
Difference = dict[str, tuple[Any, Any]]  # field -> the run's value, the recipe's value

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
ITERATIONS: Final = "schedule.iterations"
_UNSET: Final = "unset"


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it; all fields of a new run are empty.

    Attributes:
        owner: the number of the last start of its flow.
        head: its own last commit, not one of its parent.
    """

    store: Store
    name: str
    record: RunRecord | None = None
    segments: tuple[Segment, ...] = ()
    owner: int = 0
    head: IterationCommit | None = None

    @property
    def fork(self) -> Origin | None:
        return origin_of(self.record) if self.record and self.record.kind == "fork" else None

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that `arealflow set` has changed in the run, with their values, by dotted path."""
        fields = changed_fields(self.segments)
        recipe = read_recorded(self.segments[-1].recipe) if fields else {}
        return {path: value_at(recipe, path) for path in fields}

    def recipe_to_continue(self, recipe: R) -> tuple[R, dict[str, Any]]:
        """`recipe` with the fields that `changed`, and with recorded values where only a default has changed since.

        Returns the recipe, and these recorded values by dotted path. A new run's recipe is returned as it is.
        """
        if not self.segments or self.segments[-1].recipe.get("flow") != recipe.flow:
            return recipe, {}
        recipe = with_values(recipe, self.changed) if self.changed else recipe
        return keep_recorded(recipe, self.segments[-1].recipe)

    def check(self, recipe: BaseRecipe, origin: Origin | None = None) -> None:
        """UserError unless a start with this recipe and origin can continue the run, or the run is new."""
        if self.record is not None:
            check_origin(self.record, origin)
            check_same_recipe(self.name, self.record.flow, recipe, self.segments)


def read_stored_run(store: Store, name: str) -> StoredRun:
    """The run `name` as the store has it. Writes nothing.

    Raises UserError: the name is invalid; the run was removed; or a record is damaged, or is missing although later
    records exist.
    """
    check_name(name)
    check_run_kept(store, name)
    record = find_record(store, paths.run_record(name), RunRecord)
    if record is None:
        if any(store.exists(path) for path in (paths.owner(name, 1), paths.segment(name, 0))):
            raise missing_before(store, paths.run_record(name))
        return StoredRun(store, name)
    last = checked_last_number(store, lambda k: paths.iteration_commit(name, k), record.parent_iteration)
    owner = checked_last_number(store, lambda n: paths.owner(name, n), 1)
    segments = read_segments(store, name)
    if last < record.parent_iteration:
        return StoredRun(store, name, record, segments, owner)
    head = read_record(store, paths.iteration_commit(name, last), IterationCommit)
    if head.segment >= len(segments):
        raise missing_before(store, paths.segment(name, len(segments)))
    if head.provenance.owner > owner:
        raise missing_before(store, paths.owner(name, owner + 1))
    return StoredRun(store, name, record, segments, owner, head)


def check_name(name: str) -> None:
    """UserError unless `name` can be a run's name."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a run: use lower-case letters, digits, '.', '_' and '-' (run=NAME).")


def read_segments(store: Store, run: str, known: tuple[Segment, ...] = ()) -> tuple[Segment, ...]:
    """All segments of a run, in order, of which the first are `known`."""
    return (*known, *records_from(store, partial(paths.segment, run), len(known), Segment))


def check_same_recipe(name: str, flow: str, recipe: BaseRecipe, segments: tuple[Segment, ...]) -> None:
    """UserError unless `recipe` can continue the run: the same flow, and equal semantic fields or more iterations."""
    if flow != recipe.flow:
        raise UserError(f"Run {name!r} belongs to the flow {flow!r}, not {recipe.flow!r}: {_remedy(name)}")
    difference = recipe_difference(segments[-1], recipe) if segments else {}
    if difference and not only_extends(difference):
        listed = "; ".join(
            f"{field} is {recorded!r} in the run and {given!r} here" for field, (recorded, given) in difference.items()
        )
        raise UserError(f"Run {name!r} exists with another recipe: {listed}. {_remedy(name)}")


def recipe_difference(segment: Segment, recipe: BaseRecipe) -> Difference:
    """The semantic fields in which `recipe` differs from the segment's."""
    try:
        of_run = type(recipe).model_validate(read_recorded(segment.recipe))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise UserError(
            f"This version cannot read the run's recipe ({where}: {first['msg']}): "
            "continue it with the version that began it, or choose another name (run=NAME)."
        ) from error
    recorded, given = semantic_values(of_run), semantic_values(recipe)
    names = sorted(recorded.keys() | given.keys())
    pairs = {name: (recorded.get(name, _UNSET), given.get(name, _UNSET)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def only_extends(difference: Difference) -> bool:
    """Whether the recipe differs only by more iterations."""
    return difference.keys() == {ITERATIONS} and difference[ITERATIONS][1] > difference[ITERATIONS][0]


def _remedy(name: str) -> str:
    return (
        f"Choose another name (run=NAME), or use {name}'s own values to continue it. Only schedule.iterations may grow."
    )
