"""Engines that differ in rounding: who is asked for what, what is kept, and when a run stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from stage_driver import ITERATIONS, digests, drive, start_driver, store_in, tiny
from store_listing import listed

from areal_tasks.data.batching import make_layout
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.rows import read_sequences
from areal_tasks.engines.trainers import retrain_command, stage_of
from areal_tasks.rollout import spooling
from areal_tasks.stages.build import Built
from areal_tasks.stages.graphs import iteration_plan
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.objects.files import materialise, read_weights
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Sample
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe, RlhfRecipe

LOOSE = {"inference": {"deterministic": False}}


def recipe(**changes: Any) -> RlhfRecipe:
    made = tiny(**{**LOOSE, **changes})
    assert isinstance(made, RlhfRecipe)
    return made


def one_minibatch(**changes: Any) -> Recipe:
    return recipe(algorithm={"minibatches": 1, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole` of engines that differ in rounding."""
    folder = tmp_path_factory.mktemp("whole")
    drive(folder, "whole", recipe())
    return folder


def ask(folder: Path, query: str, name: str = "whole") -> list[dict[str, Any]]:
    return run_sql(store_in(folder), name, query).to_pylist()


def table(run: Run, iteration: int, stage: str, name: str) -> pa.Table:
    return read_table(run.store, stage_of(run, run.commit(iteration), stage).tables[name])


def names(made: Recipe) -> list[str]:
    return [stage.name for stage in iteration_plan(made, 1).stages]


def test_the_trainer_is_asked_only_where_engines_differ_and_the_policy_moves() -> None:
    found = names(recipe())
    assert found.index("rollout") < found.index("reference") < found.index("proximal") < found.index("train")
    assert "proximal" not in names(tiny()) and "proximal" not in names(one_minibatch())


def test_proximal_logprobs_are_those_of_a_forward_pass_at_the_version(whole: Path, tmp_path: Path) -> None:
    run, made = load_run(store_in(whole), "whole"), recipe()
    rows = table(run, 2, "rollout", "rollout")
    backend = LocalBackend(made.trainer, made.model)
    backend.load(materialise(run.store, read_weights(run.store, run.commit(1).weights).files, tmp_path), 0)
    sequences = read_sequences(rows)
    expected = torch.zeros(len(sequences.input_ids))
    for sample in range(len(rows)):
        layout = make_layout(sequences, torch.tensor([sample]), "padded")
        expected[layout.where] = backend.score(layout, made.rollout.temperature, "policy").logprobs
    found = table(run, 2, "proximal", "proximal")
    assert found["sample_id"].equals(rows["sample_id"])
    flat = torch.tensor([x for row in found["prox_logprobs"].to_pylist() for x in row])
    torch.testing.assert_close(flat, expected, atol=1e-5, rtol=1e-5)
    assert (flat != 0).sum() == sum(rows["num_generated"].to_pylist())


def test_agreement_is_that_of_the_tables(whole: Path) -> None:
    query = (
        "SELECT iteration, avg(abs(prox_logprob - logprob)) AS mean, max(abs(prox_logprob - logprob)) AS max,"
        " avg((exp(prox_logprob - logprob) NOT BETWEEN 0.9 AND 1.1)::INT) AS outside"
        " FROM tokens WHERE loss_mask GROUP BY 1 ORDER BY 1"
    )
    metrics = [dict(row["metrics"]) for row in ask(whole, "FROM stages WHERE stage = 'train' ORDER BY iteration")]
    for row, found in zip(ask(whole, query), metrics, strict=True):
        assert row["max"] < 1e-4
        assert found["logprob_gap_mean"] == pytest.approx(row["mean"], rel=1e-3, abs=1e-9)
        assert found["logprob_gap_max"] == pytest.approx(row["max"], rel=1e-3, abs=1e-9)
        assert found["ratio_outside"] == row["outside"] == 0
    steps = ask(whole, "SELECT logprob_gap_mean AS gap FROM train_steps")
    samples = ask(whole, "SELECT sample_logprob_gap AS gap FROM samples")
    assert len(steps) == 2 * ITERATIONS and all(0 <= row["gap"] < 1e-4 for row in steps + samples)


def test_one_minibatch_measures_by_its_own_forward_and_keeps_nothing_more(tmp_path: Path) -> None:
    drive(tmp_path, "r", one_minibatch())
    [row] = ask(tmp_path, "SELECT max(logprob_gap_mean) AS gap, max(ratio_max) AS ratio FROM train_steps", "r")
    assert 0 <= row["gap"] < 1e-4 and row["ratio"] == 1.0
    assert {s["stage"] for s in ask(tmp_path, "FROM stages", "r")} & {"train", "proximal"} == {"train"}


def test_engines_that_are_equal_to_the_bit_are_measured_in_the_first_minibatch(tmp_path: Path) -> None:
    drive(tmp_path, "r", tiny(schedule={"iterations": 1}))
    first, second = ask(tmp_path, "SELECT * FROM train_steps ORDER BY minibatch", "r")
    assert 0 <= first["logprob_gap_mean"] <= first["logprob_gap_max"] < 1e-4
    assert all(second[name] is None for name in ("logprob_gap_mean", "logprob_gap_max", "ratio_outside"))
    [row] = ask(
        tmp_path, "SELECT count(sample_logprob_gap) AS known, avg(sample_logprob_gap) AS mean FROM samples", "r"
    )
    assert row["known"] == first["samples"] and row["mean"] < 1e-4


def test_a_resumed_iteration_reuses_the_proximal_table_and_its_past_is_replayed_with_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers need not give the same bits again: what they and the trainer gave is in the tables."""
    process = start_driver(tmp_path, "r", recipe(trainer={"recover_within_seconds": 3600.0}), die_at="train 2")
    process.join()
    assert process.exitcode == -9
    before, reused = digests(tmp_path, "r"), dict[str, bool]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        found = run_directly(jobs)
        reused.update({built.manifest.stage: built.reused for built in found})
        return found

    with caplog.at_level("INFO", "areal_tasks"):
        run = drive(tmp_path, "r", recipe(), execute)
    assert "retrained 2 committed iterations; largest difference in a metric: 0; in a weight: 0" in caplog.messages
    assert {name for name, again in reused.items() if again} >= {"rollout", "reference", "proximal", "advantage"}
    assert not reused["train"]
    assert digests(tmp_path, "r")[:2] == before
    command = retrain_command(run, stage_of(run, run.commit(1), "train"))
    assert set(command.tables) == {"rollout", "advantage", "reference", "proximal"}


@pytest.mark.parametrize("made", [recipe(), one_minibatch(), tiny()], ids=["table", "own forward", "bit-equal"])
def test_a_run_whose_engines_disagree_stops_before_it_trains(
    tmp_path: Path, made: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers say that every token of iteration 1 was half as likely again as it was."""
    honest = spooling.samples_to_table

    def shifted(samples: Sequence[Sample]) -> pa.Table:
        rows = honest(samples)
        later = [group >= made.rollout.groups for group in rows["group_id"].to_pylist()]  # type: ignore[union-attr]
        lists = [
            [x + 0.4 * m * after for x, m in zip(*pair, strict=True)]
            for after, *pair in zip(later, rows["logprobs"].to_pylist(), rows["loss_mask"].to_pylist(), strict=True)
        ]
        at = rows.schema.get_field_index("logprobs")
        return rows.set_column(at, rows.schema.field(at), pa.array(lists, rows.schema.field(at).type))

    monkeypatch.setattr(spooling, "samples_to_table", shifted)
    message = r"differ by 0\.4 nats on average and 0\.4.* at most, and 100\.0% .*max_logprob_gap allows 0\.1"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            drive(tmp_path, "r", made)
    run = load_run(store_in(tmp_path), "r")
    head = run.head()
    assert head is not None and head.iteration == 0
    assert not [path for path in listed(run.store, "r/iteration=000001/stage=train") if path.endswith(".json")]
