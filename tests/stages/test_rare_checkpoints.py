"""Checkpoints may be rare: what follows the last one is trained again from its tables, and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_driver import digests, drive, start_driver, store_in, tiny

from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.servers import Servers
from areal_tasks.engines.trainers import Retrained, difference, stage_of, worst
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.stages.train import same_attempt
from areal_tasks.store.backend import StoreError
from areal_tasks.store.objects.files import read_weights
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import Recipe

AFTER = 5  # iterations since the last checkpoint
QUICKSTART = {"layers": 2, "hidden": 128, "heads": 4, "intermediate": 344}
RARELY, OFTEN = {"recover_within_seconds": 3600.0}, {"recover_within_seconds": 1e-6}


def recipe(iterations: int, trainer: Mapping[str, Any] = RARELY, **changes: Any) -> Recipe:
    """A run with the quickstart's model and few samples an iteration."""
    settings = {"lr": 1e-3, "micro_batch_tokens": 64, "threads": 1, **trainer}
    sections: dict[str, Any] = {
        "model": {"scratch": QUICKSTART, "max_length": 12},
        "evaluation": {"every": 0, "limit": 0, "max_new_tokens": 256},
        "trainer": settings,
        "schedule": {"iterations": iterations},
        **changes,
    }
    return tiny(**sections)


def state(folder: Path, name: str, iteration: int) -> dict[str, Any]:
    """The state that a commit carries, as SQL shows it."""
    [row] = run_sql(store_in(folder), name, f"SELECT state FROM commits WHERE iteration = {iteration}").to_pylist()
    found: dict[str, Any] = json.loads(row["state"])
    return found


def compared(run: Run) -> list[bool]:
    """For each iteration, whether servers and trainer were compared by what the servers had sampled."""
    return ["logprob_gap_mean" in stage_of(run, run.commit(k), "train").metrics for k in range(run.committed)]


def test_killed_iterations_after_the_last_checkpoint_nothing_is_lost(tmp_path: Path) -> None:
    few = {"rollout": {"groups": 2, "group_size": 4, "max_new_tokens": 3}}
    drive(tmp_path, "whole", recipe(AFTER + 2, **few))
    drive(tmp_path, "r", recipe(1, OFTEN, **few))
    process = start_driver(tmp_path, "r", recipe(AFTER + 2, **few), f"train {AFTER + 1}")
    process.join()
    assert process.exitcode == -9
    run = drive(tmp_path, "r", recipe(AFTER + 2, **few))
    checkpoints = [run.commit(k).checkpoint for k in range(AFTER + 2)]
    assert {checkpoint and checkpoint.version for checkpoint in checkpoints} == {1}
    assert digests(tmp_path, "r") == digests(tmp_path, "whole")
    replayed = state(tmp_path, "r", AFTER + 1)["replayed"]
    assert (replayed["first"], replayed["iterations"]) == (1, AFTER)
    assert (replayed["difference"], replayed["weights"]) == (0.0, 0.0)
    assert "replayed" not in state(tmp_path, "r", AFTER) and "replayed" not in state(tmp_path, "whole", AFTER + 1)


def test_a_replay_that_differs_is_told_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another chunk of the head adds up the same gradient in another order: the last bits change."""
    drive(tmp_path, "r", recipe(3, {"head_chunk_tokens": 4096}))
    with caplog.at_level("INFO", "areal_tasks"):
        run = drive(tmp_path, "r", recipe(5, {"head_chunk_tokens": 16, "layout": "padded"}))
    assert compared(run) == [True, True, True, False, True], "servers had the committed weights of version 3"
    replayed = state(tmp_path, "r", 3)["replayed"]
    assert 0 < replayed["difference"] < 1e-3 and 0 < replayed["weights"] < 1e-3 and replayed["iterations"] == 3
    query = "SELECT iteration FROM commits WHERE CAST(state->>'$.replayed.difference' AS DOUBLE) > 0"
    assert run_sql(store_in(tmp_path), "r", query).to_pylist() == [{"iteration": 3}]
    assert 0 < replayed["loss"] <= replayed["difference"]
    [line] = [r for r in caplog.records if "retrained 3 committed iterations" in r.message]
    where = f"({replayed['metric']} of iteration {replayed['iteration']}), in the loss: {replayed['loss']:.3g}"
    assert line.levelname == "WARNING" and where in line.message


def test_weights_that_re_training_does_not_repeat_are_published_before_anything_is_generated(tmp_path: Path) -> None:
    engines = {"inference": {"slots": 16, "groups_per_request": 4, "threads": 1, "deterministic": False}}
    drive(tmp_path, "r", recipe(3, {"head_chunk_tokens": 4096}, **engines))
    generated: list[int] = []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "rollout 3":
            generated.append(jobs[0].context.engines.servers.inference().version or 0)
        return run_directly(jobs)

    run = drive(tmp_path, "r", recipe(5, {"head_chunk_tokens": 16}, **engines), execute)
    before, after, next_ = run.commit(2), run.commit(3), run.commit(4)
    assert after.restored is not None and generated == [3]
    assert (after.restored.version, next_.restored) == (before.weights.version, None)
    assert after.restored.attempt != before.weights.attempt and after.restored.digest != before.weights.digest
    assert read_weights(run.store, after.restored).digest == after.restored.digest
    assert all(compared(run)), "all samples are of weights that the trainer held"


def test_a_publication_of_restored_weights_that_a_server_fails_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"inference": {"slots": 16, "groups_per_request": 4, "threads": 1, "deterministic": False}}
    drive(tmp_path, "r", recipe(2, {"head_chunk_tokens": 4096}, **engines))
    serve, failed = Servers.serve, list[int]()

    def fails_once(servers: Servers, ref: WeightsRef, *arguments: Any, **named: Any) -> list[float]:
        if not failed:
            failed.append(ref.version)
            raise ServerDown("it failed at its new weights")
        return serve(servers, ref, *arguments, **named)

    monkeypatch.setattr(Servers, "serve", fails_once)
    run = drive(tmp_path, "r", recipe(3, {"head_chunk_tokens": 16}, **engines))
    assert failed == [2] and run.commit(2).restored is not None


@pytest.mark.parametrize(("eta", "same"), [(0, True), (2, False)])
def test_samples_that_waited_for_a_start_may_be_of_other_weights_of_its_version(
    tmp_path: Path, eta: int, same: bool
) -> None:
    """With η = 0 a start that publishes its weights again also generates again."""
    sections = {
        "inference": {"slots": 16, "groups_per_request": 4, "threads": 1, "deterministic": False},
        "rollout": {"groups": 4, "group_size": 4, "max_new_tokens": 3, "max_head_offpolicyness": eta},
    }
    drive(tmp_path, "r", recipe(3, {"head_chunk_tokens": 4096}, **sections))
    found: list[bool] = []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        found.extend(same_attempt(job.context) for job in jobs if job.stage.name == "train")
        return run_directly(jobs)

    run = drive(tmp_path, "r", recipe(5, {"head_chunk_tokens": 16}, **sections), execute)
    assert run.commit(3).restored is not None
    assert found == [same, True]


def test_a_replay_of_what_differs_in_nothing_publishes_nothing(tmp_path: Path) -> None:
    engines = {"inference": {"slots": 16, "groups_per_request": 4, "threads": 1, "deterministic": False}}
    drive(tmp_path, "r", recipe(2, **engines))
    run = drive(tmp_path, "r", recipe(3, **engines))
    assert run.commit(2).restored is None and state(tmp_path, "r", 2)["replayed"]["difference"] == 0


def test_iterations_without_a_step_are_replayed(tmp_path: Path) -> None:
    """Nothing could be verified, so nothing was trained on: their summaries have no loss, nor any other mean."""
    unverified = {"reward": {"verifier": "stage_reward:fails", "workers": 1, "max_unverified": 1.0}}
    drive(tmp_path, "r", recipe(2, **unverified))
    run = drive(tmp_path, "r", recipe(3, **unverified))
    assert "loss" not in stage_of(run, run.commit(0), "train").metrics
    replayed = state(tmp_path, "r", 2)["replayed"]
    assert (replayed["iterations"], replayed["difference"], replayed["weights"]) == (2, 0.0, 0.0)


@pytest.mark.parametrize(
    ("committed", "again", "expected"),
    [
        ({"loss": 1.0, "train_seconds": 3.0}, {"loss": 1.0, "train_seconds": 9.0}, 0.0),
        ({"loss": 0.5, "kl": 0.1}, {"loss": 0.25, "kl": 0.1}, 0.25),
        ({"tokens": 200.0}, {"tokens": 100.0}, 0.5),
        ({"loss": 0.5}, {}, math.inf),
        ({"skipped_steps": 2.0}, {"skipped_steps": 0.0, "loss": 0.5}, 1.0),  # a step was made this time
        ({"loss": 0.5}, {"loss": 0.5, "clamped": 0.0}, 0.0),  # a newer version counts more
        ({"loss": math.nan}, {"loss": math.nan}, 0.0),
        ({"loss": math.nan}, {"loss": 1.0}, math.inf),
        ({}, {}, 0.0),
    ],
)
def test_how_far_two_summaries_are_apart(committed: dict[str, float], again: dict[str, float], expected: float) -> None:
    assert difference(committed, again)[0] == expected


def test_the_worst_of_several_replays() -> None:
    first = Retrained(first=2, iterations=3, difference=0.1, metric="kl", iteration=4, weights=0.5, loss=0.03)
    second = Retrained(first=5, iterations=1, difference=0.2, metric="entropy", iteration=5, loss=0.02)
    assert worst([first, second]) == Retrained(2, 3, 0.2, "entropy", 5, 0.5, 0.03)
    assert not second.same and Retrained(0, 2, 0.0, "loss", 0, 0.0).same and Retrained(0, 2, 0.0, "", 0).same
    assert not (first.same_weights or second.same_weights)
    rounded = replace(second, weights=0.0)  # metrics were computed on another processor
    assert rounded.same_weights and not rounded.same


def test_what_is_replayed_is_what_was_committed(tmp_path: Path) -> None:
    """Damage to the manifest of a stage that `train` read: the file is named, and nothing is trained."""
    run: Run = drive(tmp_path, "r", recipe(2))
    ref = next(ref for ref in run.commit(1).stages if ref.stage == "advantage")
    path = Path(run.store.uri(ref.path))
    path.write_bytes(path.read_bytes().replace(b'"stage": "advantage"', b'"stage": "advancage"'))
    with pytest.raises(StoreError, match=rf"{ref.key}\.json is damaged"):
        drive(tmp_path, "r", recipe(3))
