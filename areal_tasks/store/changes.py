"""Changes of a run in progress: `arealflow set` requests them, and the run's flow applies them.

A request is a record `changes/<n>.json`, numbered without gaps. Only the owner of the run appends segments: one per
change, in order. The segment contains the change and applies from an iteration of which no stage has started.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, every_record, new_attempt
from areal_tasks.store.history.journal import Details, append_log, current_user
from areal_tasks.store.provenance import now
from schemas.errors import UserError
from schemas.manifest import Change, ChangeRecord, Segment
from schemas.recipe.recipe import Recipe
from schemas.recipe.recorded import with_values

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

log = logging.getLogger(__name__)


def last_change(segments: Sequence[Segment]) -> int:
    """The number of the last change that a segment applies; 0 if there was none."""
    return max((segment.change.n for segment in segments if segment.change), default=0)


def changed_fields(segments: Sequence[Segment]) -> list[str]:
    """The dotted paths of the fields that changes have set."""
    return sorted({path for segment in segments if segment.change for path in segment.change.values})


def requested_changes(store: Store, run: str, after: int = 0) -> Iterator[Change]:
    """The requested changes from number `after` + 1 on, in order; after `last_change`, those that none applies yet.

    Raises StoreError: one is missing before the last.
    """
    return (record.change for record in every_record(store, partial(paths.change, run), after + 1, ChangeRecord))


def request_change(store: Store, run: str, n: int, values: Mapping[str, Any]) -> Change | None:
    """Record a request as the n-th change; None if another process has recorded the n-th."""
    change = Change(n=n, values=dict(values), user=current_user(), host=socket.gethostname(), time=now())
    record = ChangeRecord(attempt=new_attempt(), change=change)
    _, mine = commit_once(store, paths.change(run, n), record)
    return change if mine else None


def describe(change: Change) -> str:
    """`rollout.pace=3 (ann@host, 2026-11-24 00:31:05)`."""
    values = ", ".join(f"{path}={value}" for path, value in change.values.items())
    return f"{values} ({change.user}@{change.host}, {change.time[:19].replace('T', ' ')})"


class Changes:
    """Applies requested changes. `check` raises UserError for a recipe to which the run's services cannot change."""

    def __init__(self, check: Callable[[Recipe], None]) -> None:
        self._check = check
        self._refused = 0  # number of the last change that could not be applied

    def apply(self, run: Run, recipe: Recipe, first: int) -> tuple[Run, Recipe]:
        """The run and its newest recipe with all pending changes, in force from iteration `first` on."""
        for change in requested_changes(run.store, run.name, max(last_change(run.segments), self._refused)):
            try:
                changed = with_values(recipe, change.values)
                self._check(changed)
            except UserError as error:  # this start has another recipe than the one that the change was checked with
                log.warning("%s cannot be put into force here: %s", describe(change), error)
                note(run, "refused", change, {"why": str(error)})
                self._refused = change.n
                continue
            run, recipe = run.with_change(change, first, changed), changed
            begin = run.segments[-1].from_iteration
            log.info("from iteration %d on: %s", begin, describe(change))
            note(run, "changed", change, {"from_iteration": begin})
        return run, recipe


def note(run: Run, action: str, change: Change, details: Details) -> None:
    """Write to the run's log whether a change was applied."""
    asked: dict[str, Any] = {"owner": run.owner, "change": change.n, "by": f"{change.user}@{change.host}"}
    append_log(run.store, run.name, action, {**asked, **change.values, **details})
