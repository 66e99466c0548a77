"""Weights that a later commit names, since their iteration's was there before them, stay as long as they are needed."""

from __future__ import annotations

from pathlib import Path

from stage_driver import drive, left_over, start_driver, store_in, tiny
from waiting import wait_until

from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import remove_planned
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import find_weights

NEWEST = RetentionRule(keep_weights=1, keep_checkpoints=1, older_than=0.0)
AHEAD = tiny(rollout={"max_head_offpolicyness": 1}, schedule={"iterations": 4}, algorithm={"max_logprob_gap": 9.0})


def test_a_start_after_gc_finds_what_it_begins_with(tmp_path: Path) -> None:
    start_driver(tmp_path, "r", AHEAD, "train 3").wait()
    wait_until(lambda: not left_over(tmp_path))
    store = store_in(tmp_path)
    head = load_run(store, "r").head()
    assert head is not None and not head.weights.written and head.published is not None
    append_log(store, "r", "failed", {"owner": 1})
    removed = remove_planned(store, plan_removals(store, NEWEST), NEWEST)
    assert head.published.path not in {item.manifest for item in removed}
    assert find_weights(load_run(store, "r"), "newest") == head.published
    drive(tmp_path, "r", AHEAD)
    assert audit(store, "r").sound


def test_weights_that_another_run_began_with_stay(tmp_path: Path) -> None:
    store = drive(tmp_path, "r", AHEAD).store
    drive(tmp_path, "next", tiny(model={"path": "run://r@2", "scratch": None}, schedule={"iterations": 1}))
    made = find_weights(load_run(store, "r"), "2")
    assert load_run(store, "r").commit(2).published == made
    for run in ("r", "next"):
        append_log(store, run, "finished", {"owner": 1})
    removed = {item.manifest for item in plan_removals(store, NEWEST, "r") if item.version is not None}
    assert removed and made.path not in removed
