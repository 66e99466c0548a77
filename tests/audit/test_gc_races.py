"""What comes between two steps of another: a removal during a start, a tag during `gc`, a put that was sent twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_driver import tiny

from areal_tasks.engines import models
from areal_tasks.store import opening, paths
from areal_tasks.store.backend import Exists, Store
from areal_tasks.store.catalog import Catalog, list_compactions
from areal_tasks.store.fork import Origin, find_reference, write_reference
from areal_tasks.store.history.audit import audit
from areal_tasks.store.opening import open_run, read_stored_run
from areal_tasks.store.retention.compact import compact
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import plan_run_removal, remove_planned, remove_run
from areal_tasks.store.retention.tombstones import write_tombstone
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import find_tag, tag_weights
from schemas.errors import UserError
from schemas.manifest import Reference


def write_tombstone_run(store: Store) -> None:
    """What a removal does before it looks who needs the run."""
    write_tombstone(store, paths.run_tombstone("small"), "run", "small", 0, "it was named with --remove")


def test_who_begins_with_the_weights_of_a_run_that_is_being_removed_is_refused(
    small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any) -> Reference:
        write_tombstone_run(small)
        return write_reference(*arguments)

    monkeypatch.setattr(models, "write_reference", late)
    with pytest.raises(UserError, match="Run 'small' was removed by"):
        models.run_weights(small, "run://small@2", "next")
    assert find_reference(small, "small", "next") is not None, "the removal can still see it"


def test_a_start_of_a_run_that_is_being_removed_is_refused(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, before = opening._claim, load_run(small, "small")

    def late(*arguments: Any) -> int:
        write_tombstone_run(small)
        return claim(*arguments)

    monkeypatch.setattr(opening, "_claim", late)
    recipe = type(tiny()).model_validate(before.recipe_at(0))
    with pytest.raises(UserError, match="Run 'small' was removed by"):
        open_run(small, "small", recipe)
    assert small.exists(paths.owner("small", 2)), "the removal can still see the claim"


@pytest.mark.parametrize("at", [0, 1])
def test_a_fork_of_a_run_that_has_been_removed_since_it_was_read_is_refused(small: Store, at: int) -> None:
    stored = read_stored_run(small, "child", Origin("small", at))
    Path(small.uri(paths.tag("small", "first"))).unlink()
    remove_run(small, plan_run_removal(small, "small", 0.0), 0.0)
    recipe = type(tiny()).model_validate(stored.parent.recipe_at(0))  # type: ignore[union-attr]
    with pytest.raises(UserError, match="Run 'small' was removed by"):
        open_run(small, "child", recipe, stored=stored)
    assert find_reference(small, "small", "child") is None and not small.exists(paths.run_record("child"))


def test_a_tag_that_comes_after_the_second_look_of_gc_is_refused(small: Store) -> None:
    Path(small.uri(paths.tag("small", "first"))).unlink()
    ref = load_run(small, "small").commit(0).weights
    rule = RetentionRule(keep_weights=1, older_than=0.0)
    assert remove_planned(small, plan_removals(small, rule), rule)
    with pytest.raises(UserError, match="weights of version 1 of run 'small' were removed by"):
        tag_weights(small, "small", "late", ref)
    assert find_tag(small, "small", "late") is not None, "a gc that is about to look again can still see it"


def test_a_compaction_whose_put_was_sent_twice_is_made(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Store.create

    def twice(self: Store, path: str, data: bytes) -> None:
        create(self, path, data)
        raise Exists(path)

    run, before = load_run(small, "small"), len(list_compactions(small, "small"))
    catalog = Catalog(run)
    monkeypatch.setattr(Store, "create", twice)
    made = compact(catalog, catalog.regions)
    assert len(list_compactions(small, "small")) == before + 1 and made.stop == 2
    assert audit(small, "small").sound
