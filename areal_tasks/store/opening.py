"""How a start of a flow opens its run: what the store has of it, whether a recipe may continue it, and the claim.

A run's recipe is a list of segments: each is the same recipe with more iterations, or with a change by `arealflow set`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.changes import changed_fields
from areal_tasks.store.commit import (
    AHEAD,
    append_record,
    check_owners,
    checked_last_number,
    commit_once,
    find_record,
    new_attempt,
    read_record,
)
from areal_tasks.store.fork import Origin, attach_to_parent, check_origin, log_derivation, origin_of
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.retention.tombstones import check_run_kept
from areal_tasks.store.runs import (
    ITERATIONS,
    Run,
    check_begun,
    check_name,
    check_segment,
    load_run,
    read_segments,
    superseded,
)
from schemas.errors import UserError
from schemas.manifest import PROMPT_ORDER, IterationCommit, OwnerRecord, RunRecord, Segment
from schemas.recipe.recipe import BaseRecipe
from schemas.recipe.recorded import keep_recorded, read_recorded, value_at, with_values

R = TypeVar("R", bound=BaseRecipe)
Difference = dict[str, tuple[Any, Any]]  # field -> the run's value, the recipe's value

_UNSET: Final = "unset"


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it; of a new one only where it will come from.

    Attributes:
        origin: where a derived run comes from.
        parent: the run it is derived from.
        owner: the number of the last start of its flow.
        head: its own last commit, not one of its parent.
    """

    store: Store
    name: str
    origin: Origin | None = None
    parent: Run | None = None
    record: RunRecord | None = None
    segments: tuple[Segment, ...] = ()
    owner: int = 0
    head: IterationCommit | None = None

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

    def check(self, recipe: BaseRecipe) -> None:
        """UserError unless a start with this recipe can continue the run, or the run is new."""
        if self.record is not None:
            check_same_recipe(self.name, self.record.flow, recipe, self.segments)


def read_stored_run(store: Store, name: str, origin: Origin | None = None) -> StoredRun:
    """The run `name` as the store has it. Writes nothing.

    `origin`: where a new run, or the existing one, is to come from; None for no new derived run.

    Raises UserError: the name is invalid; the run was removed, or has another origin; or a record is damaged, or is
    missing although later records exist.
    """
    check_name(name)
    check_run_kept(store, name)
    record = find_record(store, paths.run_record(name), RunRecord)
    if record is None:
        check_begun(store, name)
        return StoredRun(store, name, origin, load_run(store, origin.parent) if origin else None)
    check_origin(record, origin)
    parent = load_run(store, record.parent) if record.parent else None
    last = checked_last_number(store, partial(paths.iteration_commit, name), record.parent_iteration, AHEAD)
    owner = checked_last_number(store, partial(paths.owner, name), 1, AHEAD)
    segments = read_segments(store, name)
    check_owners(store, name, owner, [segment.provenance.owner for segment in segments])
    stored = StoredRun(store, name, origin_of(record), parent, record, segments, owner)
    if last < record.parent_iteration:
        return stored
    run = Run(store, name, record, 0, segments, known_parent=parent)
    [head] = run.commits(last, last + 1)
    check_segment(store, head, segments)
    check_owners(store, name, owner, [head.provenance.owner])
    return replace(stored, head=head)


def open_run(
    store: Store,
    name: str,
    recipe: BaseRecipe,
    *,
    origin: Origin | None = None,
    segments: Sequence[tuple[int, BaseRecipe]] = (),
    prefect_flow_run_id: str = "",
    stored: StoredRun | None = None,
    claims: set[str] | None = None,
) -> Run:
    """Create the run, or continue it from its head, as its next owner.

    The recipe's semantic fields must be the run's own (see `StoredRun.recipe_to_continue`), but it may have more
    iterations (a new segment).

    Args:
        origin: the parent, for a derived run whose `stored` is not given. Not needed to continue an existing fork.
        segments: for a replay, its recipes with the first iteration of each; the last one is `recipe`.
        stored: what the store holds of the run, if the caller has read it, and checked the recipe against it.
        claims: of a caller that may start the run several times: what identifies its starts; this one is added.

    Raises:
        UserError: the name is invalid, the run was removed, or it exists with another recipe, flow or origin; fields
            and remedies are named.
        Superseded: another process has started the run since the last of `claims`.
    """
    if stored is None:
        stored = read_stored_run(store, name, origin)
        stored.check(recipe)  # before the claim fences off a running start
    record = stored.record
    if record is None:
        record, mine = _create(stored, recipe)
        if not mine:  # another start has created it meanwhile, perhaps with another recipe or origin
            read_stored_run(store, name, stored.origin).check(recipe)
        elif stored.origin is not None:
            log_derivation(store, name, stored.origin, prefect_flow_run_id)
    owner = _claim(store, name, stored.owner, prefect_flow_run_id, set() if claims is None else claims)
    check_run_kept(store, name)  # a removal that missed this claim left its tombstone before
    segments_now = read_segments(store, name, stored.segments)
    run = Run(store, name, record, owner, segments_now, stored.head, stored.parent)
    for first, part in segments[len(run.segments) :]:
        run = run.with_segment(first, part)
    while not run.segments or only_extends(recipe_difference(run.segments[-1], recipe)):
        run = run.with_segment(run.committed if run.segments else run.first, recipe)
    check_same_recipe(run.name, record.flow, recipe, run.segments)  # a concurrent start may have won
    return run


def _create(stored: StoredRun, recipe: BaseRecipe) -> tuple[RunRecord, bool]:
    """The record of a new run, and whether this start has created it."""
    origin, parent = stored.origin, stored.parent
    if origin and parent:
        attach_to_parent(parent, stored.name, origin)
    record = RunRecord(
        run=stored.name,
        flow=recipe.flow,
        seed=recipe.seed,
        attempt=new_attempt(),
        order=parent.record.order if parent else PROMPT_ORDER,
        **(origin.recorded() if origin else {}),
        provenance=make_provenance(0, now()),
    )
    return commit_once(stored.store, paths.run_record(stored.name), record)


def _claim(store: Store, name: str, last: int, prefect_flow_run_id: str, claims: set[str]) -> int:
    """Claim the next owner number after `last`, or a later one if others have claimed since, and return it.

    With earlier `claims` of this process the owner before must be one of them. They include claims of unknown outcome.
    """
    restarts = bool(claims)

    def owner(n: int) -> OwnerRecord:
        """The record of this process as the n-th owner."""
        if restarts and n > 1:
            before = read_record(store, paths.owner(name, n - 1), OwnerRecord)
            if before.attempt not in claims:
                raise superseded(name, f"owner {n - 1} is a process of {before.host}")
        claims.add(attempt := new_attempt())
        return OwnerRecord(
            n=n,
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=now(),
            prefect_flow_run_id=prefect_flow_run_id,
        )

    return append_record(store, partial(paths.owner, name), last + 1, owner).n


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
