"""Runs whose reward, workflow and filter are edited between a kill and the resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from stage_driver import GROUPS, digests, left_over, start_driver, start_marked, store_in, tiny
from test_asynchronous_runs import die_ahead
from waiting import wait_until

from areal_tasks.store.history.audit import audit
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from areal_tasks.store.spool import read_spool
from schemas.recipe.recipe import Recipe

CODE = """
from dataclasses import replace
from areal_tasks.workflows.single_turn import SingleTurn
from the_mark import MARK

def reward(prompt, completion, answer):
    return float(MARK) + len(completion) % 2 / 4

class Marked:
    async def run(self, prompt, context):
        return [replace(sample, turns=MARK) for sample in await SingleTurn().run(prompt, context)]

def keeps(samples, rewards):
    return f"of {MARK}" if samples[0].prompt.group_id % 5 == MARK % 5 else None
"""
QUIET: dict[str, Any] = {"every": 0, "limit": 0, "max_new_tokens": 256}
BY_ITERATION = "SELECT iteration, min(turns) AS least, max(turns) AS most, min(floor(reward)) AS low, \
max(floor(reward)) AS high FROM samples GROUP BY 1 ORDER BY 1"


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Edits the users' code, of which a module beside it holds the mark that all three leave."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "edited_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)

    def write(mark: int) -> None:  # of another size, as Python compares times to the second
        (folder / "the_mark.py").write_text(f"MARK = {mark}")

    write(1)
    return write


def resumed(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """By iteration, the marks of the workflow and the reward in the rows, once another process has ended the run."""
    wait_until(lambda: not left_over(folder))
    start_driver(folder, "run", recipe).wait()
    store = store_in(folder)
    assert audit(store, "run").sound
    return run_sql(store, "run", BY_ITERATION).to_pylist()


def test_at_eta_0_the_open_iteration_is_judged_again_by_an_edited_reward(tmp_path: Path, edit: Any) -> None:
    recipe = tiny(reward={"verifier": "edited_code:reward"}, evaluation=QUIET, schedule={"iterations": 2})
    start_driver(tmp_path, "run", recipe, "advantage 1").wait()
    before = digests(tmp_path, "run")
    edit(22)
    assert [(row["low"], row["high"]) for row in resumed(tmp_path, recipe)] == [(1, 1), (22, 22)]
    run = load_run(store_in(tmp_path), "run")
    assert digests(tmp_path, "run")[:1] == before, "what is committed is history"
    owners = {ref.stage: run.read_stage(ref).provenance.owner for ref in run.commit(1).stages}
    assert (owners["rollout"], owners["verify"]) == (1, 2), "the reward decides nothing about the completions"


def test_ahead_spooled_groups_and_their_verdicts_are_made_again_by_edited_code(tmp_path: Path, edit: Any) -> None:
    recipe = tiny(
        rollout={"max_head_offpolicyness": 4, "flush_seconds": 0.0, "filters": {"function": "edited_code:keeps"}},
        workflow={"name": "edited_code:Marked"},
        reward={"verifier": "edited_code:reward"},
        evaluation=QUIET,
        algorithm={"max_logprob_gap": 9.0},
        schedule={"iterations": 5},
    )
    start_marked(tmp_path, die_ahead, tmp_path, "run", recipe, "train 1").wait()
    committed = load_run(store_in(tmp_path), "run").committed
    spooled = {group.index for record in read_spool(store_in(tmp_path), "run") for group in record.finished}
    assert committed == 1 and any(index >= 2 * GROUPS for index in spooled)
    edit(22)
    marks = [tuple(row.values())[1:] for row in resumed(tmp_path, recipe)]
    assert marks == [(1, 1, 1, 1)] * committed + [(22, 22, 22, 22)] * (5 - committed)
    taken = run_sql(store_in(tmp_path), "run", "SELECT DISTINCT group_id AS id FROM samples WHERE iteration > 0")
    assert not any(group % 5 == 22 % 5 for group in taken["id"].to_pylist()), "the edited filter rejects them"
    assert "edited_code" not in sys.modules
