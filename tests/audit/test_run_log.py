"""What the flow tells in the log of its run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prefect.exceptions import Pause, TerminationSignal

from areal_tasks.store.backend import open_store
from areal_tasks.store.history.journal import code_of_last_start, read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import Run
from flows import execute
from flows.execute import log_start_and_end
from schemas.errors import UserError
from schemas.recipe.load import load_recipe

CHANGED = ("code changed", "finished")


def start(folder: Path, *overrides: str) -> Run:
    return open_run(open_store(folder.as_uri()), "r", load_recipe("quickstart", overrides))


def test_a_start_and_its_end_are_logged_with_the_flow_run(tmp_path: Path) -> None:
    with log_start_and_end(start(tmp_path), "flow-run-1", {}):
        pass
    first, last = read_log(open_store(tmp_path.as_uri()), "r")
    assert (first.action, last.action) == ("started", "finished")
    assert first.prefect_flow_run_id == last.prefect_flow_run_id == "flow-run-1"
    assert (first.details["owner"], first.details["iterations"]) == (1, 0)
    assert first.details["head"] == start(tmp_path).digest_before(0)


def test_a_later_start_resumes_and_says_what_it_asks_for_beyond(tmp_path: Path) -> None:
    start(tmp_path)
    with log_start_and_end(start(tmp_path, "schedule.iterations=300"), "", {}):
        pass
    log = read_log(open_store(tmp_path.as_uri()), "r")
    assert [record.action for record in log] == ["resumed", "extended", "finished"]
    assert (log[1].details["segment"], log[1].details["from_iteration"]) == (1, 0)


def test_what_users_code_a_start_runs_is_logged_and_what_was_edited_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "get_run_logger", lambda: logging.getLogger("run"))
    first, second = {"reward.verifier": "a1", "workflow.name": "b1"}, {"reward.verifier": "a2", "workflow.name": "b1"}
    for code in (first, first, second):
        with log_start_and_end(start(tmp_path), "", code):
            pass
    log = read_log(open_store(tmp_path.as_uri()), "r")
    assert [line.action for line in log] == [*("started", "finished", "resumed", "finished", "resumed"), *CHANGED]
    assert log[-2].details == {"owner": 3, "from_iteration": 0, "reward.verifier": "a2, before a1"}
    assert code_of_last_start(open_store(tmp_path.as_uri()), "r") == second


def test_ctrl_c_says_how_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(execute, "get_run_logger", lambda: logging.getLogger("run"))
    with pytest.raises(KeyboardInterrupt), log_start_and_end(start(tmp_path), "", {}):
        raise KeyboardInterrupt
    assert "run r is interrupted: start it again with run=r to resume it" in caplog.messages
    assert read_log(open_store(tmp_path.as_uri()), "r")[-1].action == "interrupted"


@pytest.mark.parametrize(
    ("error", "action", "reason"),
    [
        (UserError("the verifier is broken\nsecond line"), "failed", "UserError: the verifier is broken"),
        (TerminationSignal(signal=15), "interrupted", "TerminationSignal"),  # of an unknown flow run
        (Pause("suspended by a person"), "suspended", "Pause: suspended by a person"),
    ],
)
def test_an_end_before_the_last_iteration_is_logged_and_passed_on(
    tmp_path: Path, error: BaseException, action: str, reason: str
) -> None:
    with pytest.raises(type(error)), log_start_and_end(start(tmp_path), "", {}):
        raise error
    last = read_log(open_store(tmp_path.as_uri()), "r")[-1]
    assert (last.action, last.details["reason"]) == (action, reason)
