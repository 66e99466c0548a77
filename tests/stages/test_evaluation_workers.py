"""The groups of an evaluation run in a rollout worker: a workflow that ends its process does not end the flow's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stage_driver import drive, finished, tiny, tiny_evaluation
from test_stages_beside import stages_of
from waiting import LIMIT

from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.stages import evaluate
from areal_tasks.store.reachable import stages_of as evaluation_stages
from areal_tasks.store.runs import Run
from schemas.errors import UserError

MISBEHAVES = 5  # a held-out prompt


def misbehaving(folder: Path, how: str, kind: str = "Misbehaving") -> Any:
    """One group at a time, so that it is known which are finished, and which are under way."""
    workflow = {"name": f"working:{kind}", "arguments": {"how": how, "group": MISBEHAVES, "folder": str(folder)}}
    inference = {"slots": 16, "groups_per_request": 1, "max_concurrent_requests": 1, "threads": 1}
    return {"workflow": workflow, "inference": inference, "launcher": {"type": "local", "restarts": 0}}


def table_of(run: Run) -> str:
    """The digest of the first evaluation."""
    ref = next(ref for ref in evaluation_stages(run, run.commit(0)) if ref.stage == "evaluate")
    return run.read_stage(ref).tables["evaluate"].digest


def test_an_end_of_the_worker_costs_what_is_not_taken_and_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a restart of the supervisor: the end counts against the group in flight."""
    finished(tmp_path, "trained", tiny())
    calm = drive(tmp_path, "calm", tiny_evaluation("run://trained"))
    taken, consume = list[int](), Rollouts.consume

    def noted(rollouts: Rollouts, groups: Sequence[int]) -> None:
        consume(rollouts, groups)
        taken.extend(groups)
        if taken == [0, 1, 2, 3]:
            (tmp_path / "go").touch()

    monkeypatch.setattr(Rollouts, "consume", noted)
    monkeypatch.setattr(evaluate, "AT_ONCE", 2)
    misbehaves = misbehaving(tmp_path, "leave", "MisbehavingLater")
    run = drive(tmp_path, "ended", tiny_evaluation("run://trained", **misbehaves))
    assert table_of(run) == table_of(calm)
    attempts = [int(group) for group in (tmp_path / "attempts").read_text().split()]
    assert attempts[:6] == [0, 1, 2, 3, 4, 5] and sorted(attempts[6:]) == [4, 5, 6, 7]
    left = list((tmp_path / "store").glob("ended/**/rollout*.parquet"))
    assert not left, "what the worker wrote for the stage is removed"


def test_a_group_that_always_ends_its_worker_ends_the_evaluation_and_says_so(tmp_path: Path) -> None:
    finished(tmp_path, "trained", tiny())
    with pytest.raises(
        UserError, match=rf"group {MISBEHAVES} has failed .*: its rollout worker ended 3 times .* only this group"
    ):
        drive(tmp_path, "ended", tiny_evaluation("run://trained", **misbehaving(tmp_path, "always")))


def test_in_a_training_run_it_costs_training_nothing(tmp_path: Path) -> None:
    """Training has a group of that number, too, but later: the worker of its groups goes on."""
    recipe = tiny(**misbehaving(tmp_path, "leave"), rollout={"groups": 4, "group_size": 4, "max_new_tokens": 3})
    run = drive(tmp_path, "run", recipe)
    assert ("evaluate", 0) in stages_of(run, 0)
    names = {path.name for path in (tmp_path / "logs" / "run").glob("rollout-*.log")}
    assert names == {"rollout-0-1-0.log", "rollout-evaluation-1-0.log", "rollout-evaluation-1-1.log"}


@pytest.mark.parametrize("blocks", [True, False])
def test_a_workflow_that_never_ends_fails_with_the_setting_that_limits_it(tmp_path: Path, blocks: bool) -> None:
    finished(tmp_path, "trained", tiny())
    limited = {"blocked_seconds": 0.1 if blocks else LIMIT, "name": "working:Stuck", "arguments": {"blocks": blocks}}
    evaluation = {"limit": 1, "max_new_tokens": 3, "group_seconds": LIMIT if blocks else 0.1}
    recipe = tiny_evaluation("run://trained", workflow=limited, evaluation=evaluation, launcher={"type": "local"})
    with pytest.raises(UserError, match="workflow.blocked_seconds" if blocks else "evaluation.group_seconds"):
        drive(tmp_path, "stuck", recipe)
