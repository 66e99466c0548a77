"""Replays: only what a change reaches is built anew, from the recorded rollouts unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from replays import kept, replay
from stage_driver import digests, drive, store_in, tiny

from areal_tasks.store.runs import Run

ITERATION = ["initialise", "prompts", "rollout", "verify", "reference", "advantage", "train", "publish", "scalars"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`."""
    folder = tmp_path_factory.mktemp("whole")
    drive(folder, "whole", tiny())
    return folder


def made_in(run: Run, k: int) -> dict[str, str]:
    """Which run made each stage of a committed iteration."""
    return {ref.stage: ref.path.split("/")[0] for ref in run.commit(k).stages}


def test_another_learning_rate_trains_on_the_recorded_rollouts(whole: Path) -> None:
    run = replay(whole, "lr", kept("train"), "trainer.lr=0.003")
    for k in range(3):
        made = made_in(run, k)
        assert sorted(made) == sorted(ITERATION)
        assert {stage for stage, name in made.items() if name == "lr"} == {"train", "publish", "scalars"}
    weights = [dict(iteration)["weights"] for iteration in digests(whole, "lr")]
    assert not set(weights) & {dict(iteration)["weights"] for iteration in digests(whole, "whole")}
    assert not [path for path in store_in(whole).list("lr/services") if "inference" in path]
    assert run.record.counterfactual


def test_nothing_changed_and_made_anew_gives_the_same_bits(whole: Path) -> None:
    """What comes out equal is where the replay stops: what follows is the original's own."""
    run = replay(whole, "again", kept("verify"))
    assert {stage for k in range(3) for stage, name in made_in(run, k).items() if name == "again"} == {"verify"}
    trained = replay(whole, "trained", kept("train"))
    assert {s for k in range(3) for s, name in made_in(trained, k).items() if name == "trained"} == {"train"}
    both = [[pair for pair in iteration if pair[0] != "evaluate"] for iteration in digests(whole, "whole")]
    assert digests(whole, "again") == digests(whole, "trained") == both
