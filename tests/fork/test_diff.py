"""Where two runs first differ, and how their curves compare."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replays import kept, replay
from stage_driver import drive, finished, store_in, tiny
from typer.testing import CliRunner

from areal_tasks.store.fork import Origin
from areal_tasks.store.history.diff import Difference, diff_runs
from areal_tasks.store.history.diff_curves import BARS, WIDTH, compare_curves, compare_distributions, sparkline
from areal_tasks.store.opening import open_run
from flows.cli.main import app
from schemas.errors import UserError

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds a run, another of the same recipe, a fork, a replay, and one of another seed."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, "whole", tiny())
    drive(folder, "twin", tiny(launcher={"restarts": 7}))
    drive(folder, "forked", tiny(trainer={"lr": 0.003}), origin=Origin("whole", 1))
    replay(folder, "normed", kept("advantage"), "algorithm.reward_norm=mean")
    drive(folder, "seeded", tiny(seed=2, schedule={"iterations": 2}))
    return folder


def between(folder: Path, a: str, b: str) -> Difference:
    return diff_runs(store_in(folder), a, b)


def fields(found: Difference) -> dict[str, tuple[object, object, int, bool]]:
    return {change.field: (change.a, change.b, change.iteration, change.semantic) for change in found.fields}


def test_two_runs_of_one_recipe_do_not_differ(whole: Path) -> None:
    found = between(whole, "whole", "twin")
    assert found.same and found.first is None and found.shared == 0
    assert fields(found) == {"launcher.restarts": (3, 7, 0, False)}


def test_a_run_and_itself(whole: Path) -> None:
    found = between(whole, "whole", "whole")
    assert found.same and found.shared == 3 and found.names == ("whole", "whole (again)") and not found.fields


def test_a_fork_differs_where_its_change_is_first_felt(whole: Path) -> None:
    found = between(whole, "whole", "forked")
    assert found.first is not None and found.shared == 1
    assert (found.first.iteration, found.first.stage) == (1, "train")
    assert (found.first.request, found.first.inputs) == ("differs", "the same")
    assert found.first.cause == "the recipes differ in trainer.lr"
    assert fields(found) == {"trainer.lr": (0.01, 0.003, 1, True)}
    assert found.origins == ("", "a fork of 'whole' at iteration 1")


def test_a_replay_differs_in_the_stage_it_begins_with(whole: Path) -> None:
    found = between(whole, "whole", "normed")
    assert found.first is not None and (found.first.iteration, found.first.stage) == (0, "advantage")
    assert found.only == (("evaluate",), ())
    assert found.first.cause == "the recipes differ in algorithm.reward_norm"


def test_unrelated_runs_of_another_length(whole: Path) -> None:
    found = between(whole, "whole", "seeded")
    assert found.first is not None and (found.first.iteration, found.first.stage) == (0, "initialise")
    assert found.lengths == (3, 2) and fields(found)["seed"] == (1, 2, 0, True)


def test_another_result_of_the_same_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier whose code has changed under its name."""
    drive(tmp_path, "whole", tiny(reward={"verifier": "fork_reward:scaled"}, schedule={"iterations": 1}))
    monkeypatch.setenv("FORK_SCALE", "0.5")
    replay(tmp_path, "again", kept("verify", until="verify"))
    first = between(tmp_path, "whole", "again").first
    assert first is not None and (first.stage, first.request, first.inputs) == ("verify", "the same", "the same")
    assert first.cause == "same recipe and inputs, other result: other hardware, threads or code"


def test_a_run_without_iterations(whole: Path) -> None:
    open_run(store_in(whole), "empty", tiny())
    with pytest.raises(UserError, match="'empty' has not committed any iteration: there is nothing to compare"):
        between(whole, "whole", "empty")


def said(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["diff", *words, "--store", store_in(folder).url], catch_exceptions=False)
    return done.stdout


def test_what_a_person_reads(whole: Path) -> None:
    assert said(whole, "whole", "whole").splitlines()[-1] == "no difference"
    text = said(whole, "whole", "forked")
    assert "shared: the commits of iterations 0 to 0" in text
    assert "first difference: iteration 1, train: the recipes differ in trainer.lr" in text
    assert "trainer.lr" in text and "entropy" in text and any(bar in text for bar in BARS)


def test_what_a_program_reads(whole: Path) -> None:
    found = json.loads(said(whole, "whole", "forked", "--json"))
    assert not found["same"] and found["first"]["stage"] == "train" and found["lengths"] == [3, 3]
    assert {row["curve"] for row in found["curves"]} >= {"loss", "entropy"}


# ── curves ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_curve_is_compared_where_both_have_it() -> None:
    a, b = {"loss": {0: 1.0, 1: 2.0, 2: 3.0}}, {"loss": {1: 4.0, 2: 4.0, 3: 0.0}}
    [row] = compare_curves(a, b, NAMES).rows
    assert (row["last of a"], row["last of b"], row["iterations of both"], row["mean difference"]) == (3.0, 0.0, 2, 1.5)
    assert (row["a"], row["b"]) == (sparkline([1, 2, 3], 0, 4), sparkline([4, 4, 0], 0, 4))


def test_equal_curves_are_named_and_missing_ones_are_shown() -> None:
    found = compare_curves({"kl": {0: 1.0}, "reward": {0: 1.0}}, {"kl": {0: 1.0}}, NAMES)
    assert found.title == "curves (equal in both: kl)"
    [row] = found.rows
    assert (row["curve"], row["last of b"], row["mean difference"], row["b"]) == ("reward", None, None, "")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_sparkline_has_its_lowest_and_highest_bar(values: list[float]) -> None:
    line = sparkline(values, min(values), max(values))
    assert len(line) == min(len(values), WIDTH) and set(line) <= set(BARS)
    if len(values) <= WIDTH and max(values) > min(values):
        assert line[values.index(min(values))] == BARS[0] and line[values.index(max(values))] == BARS[-1]


def test_distributions_count_what_is_unknown() -> None:
    one, other = compare_distributions("reward", np.array([0.0, 1.0, math.nan]), np.array([]), NAMES).rows
    assert (one["samples"], one["unknown"], one["mean"], one["min"], one["max"]) == (2, 1, 0.5, 0.0, 1.0)
    assert one["histogram"] == BARS[-1] + BARS[0] * 14 + BARS[-1]
    assert (other["samples"], other["mean"], other["histogram"]) == (0, None, "")
