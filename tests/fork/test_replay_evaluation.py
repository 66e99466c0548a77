"""An evaluation is judged again by another verifier: its completions stay, and no engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from replays import asked, kept, replay, segments, without_engines
from stage_driver import drive, store_in, tiny, tiny_evaluation
from store_listing import listed

from areal_tasks.report.page import make_report
from areal_tasks.stages.preflight import check_inputs
from areal_tasks.store.fork import Origin, check_forkable
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.diff import diff_runs
from areal_tasks.store.history.diff_curves import compare_replay
from areal_tasks.store.runs import load_run
from schemas.errors import UserError

JUDGED = "reward.verifier=exact"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the evaluation `score`, and `again`, judged by another verifier."""
    folder = tmp_path_factory.mktemp("scored")
    drive(folder, "trained", tiny(schedule={"iterations": 1}))
    drive(folder, "score", tiny_evaluation("run://trained"))
    replay(folder, "again", kept("verify", "score"), JUDGED, execute=without_engines)
    return folder


def test_the_completions_stay_and_the_verdicts_are_new(folder: Path) -> None:
    query = "SELECT sample_id, completion, answer, logprobs, weights_version FROM evaluate ORDER BY ALL"
    assert asked(folder, "again", query) == asked(folder, "score", query)
    verdicts = "SELECT sample_id, completion = answer AS exact, verdict, verifier FROM samples ORDER BY 1"
    there, here = (asked(folder, name, verdicts) for name in ("score", "again"))
    assert all((row["verdict"] == "correct") == row["exact"] for row in here)
    assert {row["verifier"] for row in here} != {row["verifier"] for row in there}
    [accuracy] = asked(folder, "again", "SELECT accuracy FROM evaluations")
    assert accuracy["accuracy"] == sum(row["exact"] for row in here) / len(here)


def test_what_was_read_is_told_and_vouched_for(folder: Path) -> None:
    store = store_in(folder)
    run, original = load_run(store, "again"), load_run(store, "score")
    refs = {ref.stage: ref for ref in run.commit(0).stages}
    source = next(ref for ref in original.commit(0).stages if ref.stage == "evaluate")
    assert {name for name, ref in refs.items() if ref.path.startswith("again/")} == {"evaluate"}
    assert [(given.path, given.digest) for given in run.read_stage(refs["evaluate"]).inputs][-1] == (
        source.path,
        source.digest,
    )
    assert audit(store, "again").sound and run.record.counterfactual
    assert not listed(store, "again/services") and run.commit(0).weights == original.commit(0).weights


def test_the_comparison_crosses_the_verdicts(folder: Path) -> None:
    sections = compare_replay(store_in(folder), "again")
    built, verdicts, reward, curves = sections
    assert {row["stage"]: row["built"] for row in built.rows} == {"initialise": 0, "prompts": 0, "evaluate": 1}
    assert verdicts.title.endswith("of 8 changed") and [row["samples"] for row in reward.rows] == [8, 8]
    assert "accuracy" in [row["curve"] for row in curves.rows] or "accuracy" in curves.title
    found = diff_runs(store_in(folder), "score", "again")
    assert "reward.verifier" in [change.field for change in found.fields]
    assert make_report(store_in(folder), ["again"], 8, 10**6).payload["runs"]


def test_the_same_again_and_a_replay_of_the_replay(folder: Path) -> None:
    replay(folder, "unchanged", kept("verify", "score", until="verify"))
    replay(folder, "back", kept("verify", "again"), "reward.verifier=stage_reward:digits")
    digests = {
        name: [ref.digest for ref in load_run(store_in(folder), name).commit(0).stages]
        for name in ("score", "again", "unchanged", "back")
    }
    assert digests["unchanged"] == digests["back"] == digests["score"] != digests["again"]


@pytest.mark.parametrize(
    ("origin", "change", "message"),
    [
        (kept("train", "score"), JUDGED, "'score' has no stage 'train' to replay from: replay it from verify"),
        (kept("verify", "score", until="advantage"), JUDGED, "'score' has no stage 'advantage'"),
        (kept("verify", "score"), "evaluation.temperature=0.5", "temperature is read by the stage that generated"),
        (kept("verify", "score"), "model.path=run://x", "model.path is read by|model.path changes nothing"),
        (kept("verify", "score"), "seed=3", "seed is read by"),
        (Origin("score", 0, "replay", False, "verify"), JUDGED, "on-policy: the weights .* are still the same"),
    ],
)
def test_what_cannot_be_changed_afterwards(folder: Path, origin: Origin, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        segments(folder, "no", origin, change)


def test_an_evaluation_is_not_forked(folder: Path) -> None:
    store = store_in(folder)
    message = r"'score' is an evaluation.*arealflow replay score --from verify"
    with pytest.raises(UserError, match=message):
        check_forkable(load_run(store, "score"), 0)
    with pytest.raises(UserError, match=message):  # of the flow's parameter `fork`, for which no command looks
        check_inputs(tiny(store={"url": store.url}), "child", Origin("score", 0))
