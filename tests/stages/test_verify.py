"""What the stage `verify` hands to the verifiers, what it makes of their verdicts, and under which key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from stage_driver import ITERATIONS, drive, tiny

from areal_tasks.rewards.pool import VerifierPool, VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.judging import basis
from areal_tasks.stages import verify as verify_stage
from areal_tasks.stages.evaluate import evaluate
from areal_tasks.stages.verify import check_failures, judge, made_in_advance, mean_reward, verify
from schemas.errors import UserError
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Reward


class Recorder:
    """Keeps the rows that it is given."""

    judged = 0

    def verify(self, rows: Sequence[Row]) -> list[VerifyResult]:
        self.rows = rows
        return [result() for _ in rows]


def result(verdict: str = "correct", reward: float = 1.0) -> VerifyResult:
    return VerifyResult(reward, verdict, "", "why", "math", 0.1)


def test_verifiers_are_given_how_completions_ended() -> None:
    rows = [Row("1+1=", "2", "2", False, "stop"), Row("1+2=", "3 or", "3", True, "length")]
    samples = pa.table({name: [getattr(row, name) for row in rows] for name in Row._fields})
    pool = Recorder()
    judge(cast(VerifierPool, pool), samples, "verify 0")
    assert pool.rows == rows
    assert {f"rollout.{name}" for name in Row._fields} <= set(verify(recipe("math")).reads)


def recipe(verifier: str) -> RlhfRecipe:
    found = tiny(reward={"verifier": verifier})
    assert isinstance(found, RlhfRecipe)
    return found


def test_what_workers_have_judged_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(verify_stage, "judge", lambda pool, samples, label: calls.append(label))
    run = drive(tmp_path, "judged", tiny(rollout={"max_head_offpolicyness": 2}))
    assert run.committed == ITERATIONS and not calls


def test_an_error_on_the_machine_of_a_worker_is_not_taken_over() -> None:
    class Generation:
        def verdicts(self, bases: Mapping[int, str]) -> dict[int, Sequence[VerifyResult]]:
            row = Row("p", "c", "a", False, "stop")
            assert bases == {group: basis("with", [row] * size) for group, size in {3: 2, 7: 2, 8: 1}.items()}
            return {3: [result("error"), result("timeout")], 7: [result("incorrect"), result()]}

    ids = {"group_id": [3, 3, 7, 7, 8], "sample_id": ["3-0", "3-1", "7-0", "7-2", "8-0"]}
    same = {"prompt": "p", "completion": "c", "answer": "a", "truncated": False, "stop_reason": "stop"}
    rows = pa.table(ids | {name: [value] * 5 for name, value in same.items()})
    found = made_in_advance(cast(Any, Generation()), rows, "with")
    assert {name: one.verdict for name, one in found.items()} == {
        "3-1": "timeout", "7-0": "incorrect", "7-2": "correct",
    }  # fmt: skip


@pytest.mark.parametrize(("verifier", "version"), [("math", 4), ("exact", 1), ("stage_reward:digits", 1)])
def test_the_version_of_a_verifier_is_that_of_the_stages_that_judge(verifier: str, version: int) -> None:
    """So that what was judged by another version has another key, and nothing else has."""
    assert verify(recipe(verifier)).version == evaluate(recipe(verifier)).version == version


def test_the_mean_reward_is_that_of_the_samples_that_have_one() -> None:
    results = [result(), result("timeout", 0.0), result("error", math.nan)]
    assert mean_reward(results) == 0.5
    assert mean_reward([result("error", math.nan)]) == 0.0


@pytest.mark.parametrize(
    ("verdicts", "settings", "fails"),
    [
        (["error"] + ["correct"] * 4, {}, False),
        (["error"] * 2 + ["correct"] * 4, {}, True),
        (["timeout"] * 5, {}, False),  # each has a reward: they are judged
        (["timeout"] * 2 + ["correct"] * 4, {"timeout_reward": None}, True),
        (["error"] * 2 + ["correct"] * 4, {"on_unverified": "reward"}, True),
        (["error"] * 2 + ["correct"] * 4, {"max_unverified": 0.5}, False),
        ([], {}, False),
    ],
)
def test_too_many_verdicts_that_are_no_judgement_stop_the_run(
    verdicts: list[str], settings: dict[str, Any], fails: bool
) -> None:
    results = [result(verdict) for verdict in verdicts]
    if not fails:
        return check_failures(results, Reward(**settings))
    with pytest.raises(UserError, match=r"33% of the completions could not be verified .* for example: .*: why"):
        check_failures(results, Reward(**settings))
