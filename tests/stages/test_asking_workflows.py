"""Whole runs whose workflow asks for the verdicts of its samples while their group is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_driver import digests, drive, finished, left_over, start_driver, tiny
from waiting import wait_until

from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe


def asking(verifies: bool = True, **changes: Any) -> Recipe:
    workflow = {"name": "working:Repeating", "verifies": verifies}
    reward = {"verifier": "filtering:begins_with_a_digit"}
    return tiny(**{"workflow": workflow, "reward": reward, "algorithm": {"max_logprob_gap": 9.0}, **changes})


def check_turns(run: Run) -> None:
    """The first completion was kept where it was right, and only there; in evaluations, too."""
    query = "SELECT turns, count(*) AS samples, min(reward) AS least FROM {} GROUP BY 1 ORDER BY 1"
    one, two = run_sql(run.store, run.name, query.format("samples")).to_pylist()
    assert (one["turns"], one["least"], two["turns"]) == (1, 1, 2)
    evaluated = run_sql(run.store, run.name, query.format("evaluate")).to_pylist()
    assert evaluated and all(row["turns"] == 2 or row["least"] == 1 for row in evaluated)


@pytest.mark.parametrize("eta", [0, 2])
def test_a_second_try_is_made_where_the_first_answer_is_wrong(tmp_path: Path, eta: int) -> None:
    rollout = {"max_head_offpolicyness": eta}
    run = finished(tmp_path, f"asking-{eta}", asking(rollout=rollout))
    check_turns(run)
    for ref in run.commit(1).stages:
        if ref.stage == "rollout":
            judged = read_table(run.store, run.read_stage(ref).tables["judged"])
        if ref.stage == "verify":
            verify = read_table(run.store, run.read_stage(ref).tables["verify"])
    assert judged.select(verify.column_names).equals(verify), "verdicts are not made twice"


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    finished(tmp_path, "asking-0", asking(rollout={"max_head_offpolicyness": 0}))
    recipe = asking(rollout={"max_head_offpolicyness": 0})
    start_driver(tmp_path, "killed", recipe, "verify 1").wait()
    wait_until(lambda: not left_over(tmp_path))
    drive(tmp_path, "killed", recipe)
    assert digests(tmp_path, "killed") == digests(tmp_path, "asking-0")


def test_a_recipe_that_does_not_say_so_ends_the_run_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"workflow\.verifies: the workflow asks for a verdict"):
        drive(tmp_path, "undeclared", asking(verifies=False))
