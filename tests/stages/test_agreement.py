"""Servers that are compared with the trainer although all samples are older than its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from stage_driver import drive, finished, store_in, tiny
from torch import Tensor

from areal_tasks.engines.embedded import api
from areal_tasks.engines.embedded.runner import Runner
from areal_tasks.report.page import make_report
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe

ITERATIONS = 4


def ahead(**algorithm: Any) -> Recipe:
    """Batches of fewer tokens than the comparison of sampled tokens needs."""
    rollout = {"max_head_offpolicyness": 2}
    return tiny(rollout=rollout, schedule={"iterations": ITERATIONS}, algorithm=algorithm)


def publications(run: Run) -> list[Any]:
    """The manifests of the stage, in order of their versions."""
    named = [ref for k in range(ITERATIONS) for ref in run.commit(k).stages if ref.stage == "publish"]
    return [run.read_stage(ref) for ref in named]


@pytest.mark.parametrize("minibatches", [1, 2], ids=["own-pass", "table"])
def test_each_version_is_compared_once_its_servers_have_it(tmp_path: Path, minibatches: int) -> None:
    run = finished(tmp_path, f"ahead-{minibatches}", ahead(minibatches=minibatches))
    found = publications(run)
    assert [one.iteration for one in found] == list(range(ITERATIONS))
    for one in found:
        [train] = (ref for ref in run.commit(one.iteration).stages if ref.stage == "train")
        rows = read_table(run.store, run.read_stage(train).tables["scored"]).to_pylist()
        assert {row["version"] for row in rows} == {one.iteration + 1}
        assert one.metrics["compared"] == sum(len(row["scores"]) for row in rows) > 0
        assert one.metrics["logprob_gap_mean"] < 1e-5 and one.metrics["ratio_outside"] == 0
    lines = make_report(run.store, [run.name], 1, 5_000_000).payload["runs"][0]["curves"]["gap"]
    [mean] = (line for line in lines if line["name"] == "scored tokens: mean")
    assert len(mean["y"]) == ITERATIONS


def test_a_run_with_a_wrong_server_ends_before_the_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reports the versions that it was given, and generates with other weights."""
    load = Runner.load_weights

    def others(self: Runner, weights: Mapping[str, Tensor]) -> None:
        load(self, {name: 4.0 * tensor for name, tensor in weights.items()})

    monkeypatch.setattr(Runner, "load_weights", others)
    with pytest.raises(UserError, match=r"disagree: over \d+ tokens.* were to generate with version 1"):
        drive(tmp_path, "wrong", ahead())
    assert load_run(store_in(tmp_path), "wrong").committed == 1

    run = drive(tmp_path, "wrong", ahead(max_logprob_gap=9.0))
    assert all(one.metrics["logprob_gap_mean"] > 0.1 for one in publications(run))


def test_a_server_that_scores_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of SGLang's would be that was given flags which shorten its answers."""

    def unscored(one: Any, text: str, version: str) -> dict[str, Any]:
        answer = item(one, text, version)
        answer["meta_info"].pop("input_token_logprobs", None)
        return answer

    item = api._item
    monkeypatch.setattr(api, "_item", unscored)
    with pytest.raises(UserError, match=r"the servers \(http.*\) scored 0 of \d+ tokens of prompts"):
        drive(tmp_path, "silent", ahead())


def test_a_synchronous_run_compares_what_it_trains_on(tmp_path: Path) -> None:
    run = finished(tmp_path, "plain", tiny())
    assert not any("scored" in run.read_stage(ref).tables for ref in run.commit(0).stages)
