"""Flow runs on a real Prefect server: what a person sees of them, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from prefect.exceptions import Abort
from prefect_api import ask, task_states
from recorded_runs import recipes, unpack
from stage_driver import Digests, digests, drive, start_driver, store_in, tiny, tiny_sft

from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.launchers.supervisor import ServiceFailed
from areal_tasks.store.backend import Unavailable
from areal_tasks.store.commit import commit_once
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import owner
from areal_tasks.store.runs import Run, Superseded, load_run
from flows import tasks
from flows.rlhf import rlhf
from flows.sft import sft
from schemas.errors import UserError
from schemas.manifest import IterationCommit
from schemas.recipe.recipe import Recipe


@dataclass
class Prefect:
    """Asks the server what a test wants to know."""

    api: str

    def ask(self, what: str, **query: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = ask("POST", f"{self.api}/{what}/filter", query).raise_for_status().json()
        return rows

    def last_flow_run(self) -> dict[str, Any]:
        return self.ask("flow_runs", sort="EXPECTED_START_TIME_DESC", limit=1)[0]

    def set_state(self, flow_run: dict[str, Any], kind: str) -> None:
        """As a worker does that runs it again."""
        state = {"state": {"type": kind}, "force": True}
        ask("POST", f"{self.api}/flow_runs/{flow_run['id']}/set_state", state).raise_for_status()

    def artifact(self, key: str) -> dict[str, Any]:
        return self.ask("artifacts/latest", artifacts={"key": {"any_": [key]}})[0]


@pytest.fixture(scope="module")
def prefect(api: str) -> Prefect:
    return Prefect(api)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose answers look like GSM8K's, which markdown would show as headings."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(4) for b in range(4)]
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def recipe_of(questions: Path, store: Path) -> Recipe:
    return tiny(
        data={"source": str(questions / "{split}.jsonl")},
        store={"url": store_in(store).url},
        schedule={"artifact_every": 1},
    )


def moved(recipe: Recipe, store: Path) -> Recipe:
    """The same recipe, for a run in another store."""
    return recipe.model_copy(update={"store": recipe.store.model_copy(update={"url": store_in(store).url})})


@dataclass(frozen=True)
class Resumed:
    """A run that was killed before `verify 1` and then finished by the flow; `whole` is one that was never killed."""

    folder: Path
    recipe: Recipe
    result: dict[str, Any]
    flow_run: dict[str, Any]
    whole: Digests


@pytest.fixture(scope="module")
def resumed(prefect: Prefect, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    folder = tmp_path_factory.mktemp("resumed")
    recipe = recipe_of(questions, folder)
    drive(folder, "whole", recipe)
    process = start_driver(folder, "r", recipe, "verify 1")
    process.join()
    assert process.exitcode == -9
    result = rlhf(recipe, run="r")
    yield Resumed(folder, recipe, result, prefect.last_flow_run(), digests(folder, "whole"))


def test_the_flow_says_what_it_made(resumed: Resumed) -> None:
    assert resumed.result == {"run": "r", "store": store_in(resumed.folder).url, "iterations": 3}
    assert resumed.flow_run["state_type"] == "COMPLETED"
    assert resumed.flow_run["parameters"]["run"] == "r"
    assert resumed.flow_run["parameters"]["recipe"]["rollout"]["groups"] == 4


def test_what_was_committed_is_reused_and_the_rest_is_committed(prefect: Prefect, resumed: Resumed) -> None:
    stages = [f"{stage} {k}" for stage in ("verify", "reference", "advantage", "train", "publish") for k in (1, 2)]
    later = [*stages, "rollout 2", "evaluate version 2", "evaluate version 3"]
    states = task_states(prefect.api, resumed.flow_run["id"], "rollout 1", *later)
    assert states.pop("rollout 1") == "Reused"
    assert states == dict.fromkeys(later, "Committed")


def test_the_flow_makes_the_same_bits_as_a_run_that_was_never_killed(resumed: Resumed) -> None:
    assert digests(resumed.folder, "r") == resumed.whole


def test_tasks_name_tables_and_manifests_and_hold_no_data(prefect: Prefect, resumed: Resumed) -> None:
    task_states(prefect.api, resumed.flow_run["id"], "rollout 2")
    query = {"flow_runs": {"id": {"any_": [resumed.flow_run["id"]]}}, "task_runs": {"name": {"any_": ["rollout 2"]}}}
    [run] = prefect.ask("task_runs", **query)
    assert re.search(r"rollout: 16 rows · .* · r/iteration=000002/stage=rollout/\w+\.json", run["state"]["message"])
    assert len(json.dumps(run)) < 8000


def test_the_same_run_again_has_nothing_to_do(prefect: Prefect, resumed: Resumed) -> None:
    assert rlhf(resumed.recipe, run="r") == resumed.result
    assert task_states(prefect.api, prefect.last_flow_run()["id"]) == {}


def test_a_last_commit_of_the_start_before_is_gone_on_from(
    prefect: Prefect, resumed: Resumed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(store_in(tmp_path), "r", recipe := moved(resumed.recipe, tmp_path))
    commit_mine, raced = Run.commit_iteration, list[int]()

    def commit_after_the_other(run: Run, mine: IterationCommit) -> IterationCommit:
        if mine.iteration == 1 and not raced:
            raced.append(run.owner)
            theirs = mine.provenance.model_copy(update={"owner": run.owner - 1})
            commit_once(run.store, run.commit_path(1), mine.model_copy(update={"attempt": "a", "provenance": theirs}))
        return commit_mine(run, mine)

    monkeypatch.setattr(Run, "commit_iteration", commit_after_the_other)
    assert rlhf(recipe, run="r")["iterations"] == 3
    assert raced == [2]
    assert [load_run(store_in(tmp_path), "r").commit(k).provenance.owner for k in range(3)] == [2, 1, 3]
    assert digests(tmp_path, "r") == resumed.whole


@pytest.mark.parametrize("again", [False, True], ids=["another flow run", "the same flow run"])
def test_a_start_that_has_lost_its_store_leaves_the_run_to_one_that_began_meanwhile(
    prefect: Prefect, resumed: Resumed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """If Prefect has run the flow run itself again elsewhere, that one goes on, whatever becomes of this process."""
    recipe, commit, lost = moved(resumed.recipe, tmp_path), Run.commit_iteration, list[int]()

    def lose_the_store(run: Run, mine: IterationCommit) -> IterationCommit:
        if lost:
            return commit(run, mine)
        lost.append(run.owner)
        for kind in ("CRASHED", "SCHEDULED", "PENDING", "RUNNING") if again else ():
            prefect.set_state(prefect.last_flow_run(), kind)
        with monkeypatch.context() as patch:
            patch.setattr("areal_tasks.store.opening.socket.gethostname", lambda: "elsewhere")
            open_run(store_in(tmp_path), "r", recipe)
        raise Unavailable("the store is away")

    monkeypatch.setattr(Run, "commit_iteration", lose_the_store)
    message = r"'r' has been started again since \(owner 2 is a process of elsewhere"
    with pytest.raises(Abort if again else Superseded, match=message):
        rlhf(recipe, run="r")
    assert prefect.last_flow_run()["state_type"] == ("RUNNING" if again else "FAILED")
    assert lost == [1] and not store_in(tmp_path).exists(owner("r", 3))


def test_the_log_of_the_run_tells_which_flow_run_did_what(resumed: Resumed) -> None:
    first, begun, last = read_log(store_in(resumed.folder), "r")[:3]
    assert (first.action, begun.action, last.action) == ("resumed", "first iteration", "finished")
    assert {line.prefect_flow_run_id for line in (first, begun, last)} == {resumed.flow_run["id"]}
    assert {"seconds", "train", "trainer ready"} <= begun.details.keys() and "initialise" not in begun.details
    assert (first.details["iterations"], last.details["iterations"]) == (1, 3)


def test_progress_reaches_its_end(prefect: Prefect, resumed: Resumed) -> None:
    assert prefect.artifact("r-progress")["data"] == 100.0


def headings(markdown: str) -> list[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    return [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]


def test_whole_rollouts_can_be_read_and_nothing_in_them_is_markup(prefect: Prefect, resumed: Resumed) -> None:
    page = prefect.artifact("r-rollout-page")["data"]
    assert "\n    #### " in page
    titles = headings(page)
    assert titles[0].startswith("Rollouts") and "·".join(titles).count("Best") == 1
    assert not [title for title in titles if title.isdigit()]


def test_the_table_of_rollouts_shows_answers_as_they_are(prefect: Prefect, resumed: Resumed) -> None:
    for what in ("rollout", "evaluate"):
        rows = json.loads(prefect.artifact(f"r-{what}-table")["data"])
        assert rows and {"reward", "verdict", "prompt", "completion", "answer"} <= rows[0].keys()
        for row in rows:
            assert not headings(row["answer"])
            assert MarkdownIt("commonmark").render(row["answer"]).startswith("<p>#### ")


# ── what goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


def failure(prefect: Prefect) -> str:
    run = prefect.last_flow_run()
    assert run["state_type"] == "FAILED"
    message: str = run["state"]["message"]
    return message


def test_a_bad_override_fails_with_every_problem_named(prefect: Prefect, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        rlhf(recipe_of(questions, tmp_path), run="bad", overrides="rollout.groups=0 rollout.top_p=0.9")
    message = failure(prefect)
    assert "rollout.groups: should be greater than or equal to 1, not 0" in message
    assert "rollout.top_p: rollouts are sampled from the whole vocabulary" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("reward.verifier=no_such_module:verify", "there is no module 'no_such_module'"),
        ("reward.verifier=stage_reward:no_such", "has no 'no_such'"),
        ("workflow.name=no_such_module:work", "workflow.name: no_such_module cannot be imported"),
    ],
)
def test_code_that_does_not_exist_is_refused_before_there_is_a_run(
    prefect: Prefect, questions: Path, tmp_path: Path, override: str, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        rlhf(recipe_of(questions, tmp_path), run="bad", overrides=override)
    assert expected in failure(prefect)
    assert not (tmp_path / "store").exists(), "no run, no service"
    assert task_states(prefect.api, prefect.last_flow_run()["id"]) == {}


def test_another_recipe_under_the_name_of_a_run_is_refused(prefect: Prefect, resumed: Resumed) -> None:
    with pytest.raises(UserError):
        rlhf(resumed.recipe, run="r", overrides="algorithm.clip_ratio=0.3")
    assert "algorithm.clip_ratio is 0.2 in the run and 0.3 here" in failure(prefect)
    assert digests(resumed.folder, "r") == resumed.whole


def test_a_trainer_that_fails_again_and_again_ends_the_flow_run_with_its_reason(
    prefect: Prefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted as often as the recipe says, whatever the number of retries, and the run is not begun again."""
    steps: list[int] = []

    def learn(*_: Any) -> None:
        steps.append(1)
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(LocalBackend, "learn", learn)
    monkeypatch.setattr(tasks, "RETRY_DELAYS", [0.1])
    recipe = tiny_sft(store={"url": store_in(tmp_path).url}, launcher={"restarts": 2})
    with pytest.raises(ServiceFailed):
        sft(recipe, run="fails")
    assert len(steps) == 3 and not store_in(tmp_path).exists(owner("fails", 2))
    assert "failed at /train: RuntimeError: NCCL error: unhandled system error (engines/" in failure(prefect)


def test_a_run_of_an_earlier_version_is_resumed_by_todays_recipe(
    prefect: Prefect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The deployment's parameters hold today's defaults, and nothing says which were not set."""
    store, recipe = unpack(tmp_path), recipes()["grpo"]
    assert recipe.algorithm.std_unbiased  # type: ignore[union-attr]
    assert rlhf(moved(recipe, tmp_path), run="grpo")["iterations"] == 3
    [line] = [message for message in caplog.messages if message.startswith("run grpo keeps")]
    assert "algorithm.std_unbiased=false" in line and "algorithm.max_log_ratio=0.0" in line
    run = load_run(store, "grpo")
    assert len(run.segments) == 1 and run.recipe_at(2)["algorithm"]["std_unbiased"] is False
    with pytest.raises(UserError):
        rlhf(moved(recipe, tmp_path), run="grpo", overrides="algorithm.max_log_ratio=10")
    assert "algorithm.max_log_ratio is 0.0 in the run and 10.0 here" in failure(prefect)


def test_a_persons_mistake_is_logged_without_a_traceback(
    prefect: Prefect, questions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError):
        rlhf(recipe_of(questions, tmp_path), run="bad", overrides="data.source=/no/such/{split}.jsonl")
    assert "there is no such file" in failure(prefect)
    assert "there is no such file" in caplog.text and "Traceback" not in caplog.text
