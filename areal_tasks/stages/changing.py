"""Applies the changes of a run's recipe that `arealflow set` requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from areal_tasks.store.changes import describe, last_change, requested_changes
from areal_tasks.store.history.journal import Details, append_log
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import Change
from schemas.recipe.recipe import Recipe
from schemas.recipe.recorded import with_values

log = logging.getLogger(__name__)


class Changes:
    """`check` raises UserError for a recipe to which the run's services cannot change."""

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
