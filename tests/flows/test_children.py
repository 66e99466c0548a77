"""Forks and replays as a person starts them: by the command, with task runs and artifacts on a real Prefect server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect_api import ask, task_states
from stage_driver import digests, drive, finished, start_driver, store_in, tiny, tiny_evaluation

from areal_tasks.store.fork import Origin
from areal_tasks.store.history.journal import read_log
from flows.cli.main import main
from flows.replay import replay
from flows.rlhf import rlhf
from schemas.errors import UserError

Say = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def whole(api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, "whole", tiny())
    return folder


@pytest.fixture
def say(whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs the command in this process; returns what it printed, and what it complained of."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["arealflow", *words, "--store", store_in(whole).url])
        with pytest.raises(SystemExit):
            main()
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    return run


def states_of_last(api: str, *names: str) -> dict[str, str]:
    """Name and state of the task runs of the flow run that was started last, once these have ended."""
    [last] = found(api, "flow_runs", sort="EXPECTED_START_TIME_DESC", limit=1)
    return task_states(api, last["id"], *names)


def artifact(api: str, key: str) -> dict[str, Any]:
    return found(api, "artifacts/latest", artifacts={"key": {"any_": [key]}})[0]


def found(api: str, what: str, **query: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ask("POST", f"{api}/{what}/filter", query).raise_for_status().json()
    return rows


def test_the_command_forks_and_the_same_command_again_has_nothing_to_do(whole: Path, say: Say) -> None:
    out, _ = say("fork", "whole", "--at", "2", "trainer.lr=0.003")
    name = out.split()[1]
    as_json, _ = say("fork", "whole", "--at", "2", "trainer.lr=0.003", "--json")
    store = {"store": store_in(whole).url, "iterations": 3}
    assert json.loads(as_json) == {"run": name, "kind": "fork", "parent": "whole", "iteration": 2} | store
    assert f"run {name} is a fork of 'whole' at iteration 2, with trainer.lr=0.003" in out
    assert f"run {name}: 3 iterations in" in out and name.startswith("whole-at-2-")
    assert digests(whole, name)[:2] == digests(whole, "whole")[:2] != digests(whole, name)
    assert f"run {name}: 3 iterations in" in say("fork", "whole", "--at", "2", "trainer.lr=0.003")[0]
    assert [line.action for line in read_log(store_in(whole), name)].count("forked") == 1


@pytest.mark.slow("three runs; forks by the command are in `make test`")
def test_a_deployments_parameters_fork_and_its_recipe_is_obeyed(whole: Path, api: str) -> None:
    recipe = tiny(model={"scratch": None, "warm_start": "quickstart-sft"}, store={"url": store_in(whole).url})
    rlhf(recipe, run="form", overrides="schedule.iterations=2", fork="whole@1")  # no SFT run: version 0 is the parent's
    assert digests(whole, "form")[:1] == digests(whole, "whole")[:1] and len(digests(whole, "form")) == 2
    assert states_of_last(api, "rollout 1")["rollout 1"] == "Committed"
    assert rlhf(recipe, run="form", overrides="schedule.iterations=3")["iterations"] == 3
    there, here = (dict(digests(whole, name)[2]) for name in ("whole", "form"))
    assert {stage: here[stage] for stage in ("rollout", "weights")} == {
        stage: there[stage] for stage in ("rollout", "weights")
    }


def test_the_command_replays_compares_and_tells_reuse_from_build(whole: Path, api: str, say: Say) -> None:
    out, _ = say("replay", "whole", "--from", "advantage", "algorithm.reward_norm=mean", "run=mean")
    assert found(api, "flow_runs", sort="EXPECTED_START_TIME_DESC", limit=1)[0]["name"] == "mean"
    assert "run mean is a replay of 'whole' from advantage, with its rollouts, with algorithm.reward_norm=mean" in out
    assert "advantage of a sample" in out and "loss" in out and "run mean: 3 iterations in" in out
    states = states_of_last(
        api, *(f"{s} 1" for s in ("rollout", "verify", "reference", "advantage", "train", "publish"))
    )
    assert {states[f"{stage} 1"] for stage in ("rollout", "verify", "reference")} == {"Reused"}
    assert {states[f"{stage} 1"] for stage in ("advantage", "train", "publish")} == {"Committed"}
    page = artifact(api, "mean-comparison")["data"]
    assert page.startswith("# mean is a replay of") and "| curve |" in page


def test_a_replay_as_json_is_nothing_but_json(say: Say) -> None:
    out, _ = say("replay", "whole", "--from", "verify", "--until", "verify", "reward.verifier=exact", "--json")
    found = json.loads(out)
    assert found["iterations"] == 3 and found["run"].startswith("whole-verify-")
    told = {"kind": "replay", "parent": "whole", "iteration": 0, "from": "verify", "until": "verify"}
    assert told.items() <= found.items() and found["counterfactual"] is True
    assert [section["title"].split(":")[0] for section in found["comparison"]][:3] == [
        "iterations by stage",
        "verdicts",
        "reward",
    ]


def test_an_evaluation_is_judged_anew_and_not_forked(whole: Path, api: str, say: Say) -> None:
    drive(whole, "score", tiny_evaluation("run://whole"))
    out, _ = say("replay", "score", "--from", "verify", "reward.verifier=exact", "run=exactly")
    assert "run exactly is a replay of 'score' from verify, with its rollouts" in out and "of 8 changed" in out
    assert {
        name: state for name, state in states_of_last(api, "evaluate version 0").items() if name.startswith("evaluate")
    } == {"evaluate version 0": "Committed"}
    assert "replay score --from verify" in " ".join(say("fork", "score", "--at", "0")[1].split())


def test_a_replay_that_was_killed_goes_on(whole: Path, api: str) -> None:
    origin = Origin("whole", 0, "replay", True, "train")
    lifted = tiny(trainer={"lr": 0.003}, algorithm={"max_logprob_gap": 100.0}, store={"url": store_in(whole).url})
    process = start_driver(whole, "killed", lifted, "publish 1", origin)
    process.join()
    assert process.exitcode == -9
    replay("whole", "train", overrides="trainer.lr=0.003", run="killed", store=store_in(whole).url)
    states = states_of_last(api, "train 1", "publish 1")
    assert states["train 1"] == "Reused" and states["publish 1"] == "Committed" and "train 0" not in states


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fork", "whole", "--at", "9"], "has committed 3 iterations: fork it at 0 to 3, not at 9"),
        (["fork", "whole", "--at", "1", "model.path=x"], "model"),
        (["replay", "whole", "--from", "train", "reward.verifier=exact"], "replay --from verify"),
        (["replay", "gone", "--from", "train"], "There is no run 'gone'"),
        (["diff", "whole", "gone"], "There is no run 'gone'"),
    ],
)
def test_a_mistake_with_a_child_is_one_message(say: Say, words: list[str], message: str) -> None:
    assert message in " ".join(say(*words)[1].split())


def test_a_flow_that_is_told_to_fork_what_cannot_be(whole: Path, api: str) -> None:
    with pytest.raises(UserError, match="should look like PARENT@ITERATION, such as quickstart@40"):
        rlhf(tiny(store={"url": store_in(whole).url}), run="no", fork="whole")
