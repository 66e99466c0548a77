"""A stage of minutes says in the log how far it is; a stage of seconds says nothing."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import slow_workflow
from stage_driver import drive, tiny
from waiting import wait_until

from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.stages import progress
from areal_tasks.stages.progress import progress_line, reported

LOGGER = "areal_tasks.stages.progress"


def test_a_line_holds_share_rate_and_what_is_left() -> None:
    line = progress_line("rollout 3", "samples", 96, 512, 30.0)
    assert line == "rollout 3: 96 of 512 samples (19%) after 30 s, 3.2 per second, about 130 s left"
    assert progress_line("train 0", "samples", 0, 1024, 60.0) == "train 0: 0 of 1,024 samples (0%) after 60 s"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_lines_follow_each_other_until_the_stage_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.02)
    calls: list[int] = []

    def count() -> tuple[int, int]:
        calls.append(len(calls))
        return len(calls), 100

    with caplog.at_level(logging.INFO, LOGGER), reported("verify 1", "verdicts", count):
        wait_until(lambda: len(calls) >= 3, "three looks")
    wait_until(lambda: "progress of verify 1" not in {thread.name for thread in threading.enumerate()}, "its end")
    said = lines_of(caplog)
    assert [int(re.search(r"(\d+) of 100 verdicts", line)[1]) for line in said] == [n + 1 for n in calls]  # type: ignore[index]


def test_a_short_stage_and_one_of_which_nothing_is_known_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []

    def unknown() -> tuple[int, int]:
        looks.append(len(looks))
        return 0, 0

    with caplog.at_level(logging.INFO, LOGGER):
        with reported("rollout 0", "samples", lambda: (1, 2)):
            pass
        monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
        with reported("train 0", "samples", unknown):
            wait_until(lambda: len(looks) >= 3, "three looks")
    assert not lines_of(caplog)


class Heard(logging.Handler):
    """Has stages go on that have been reported on."""

    def __init__(self, verified: Path) -> None:
        super().__init__()
        self.verified = verified

    def emit(self, record: logging.LogRecord) -> None:
        slow_workflow.SAID.append(record.getMessage())
        if re.match(r"verify 0: [1-9]", record.getMessage()):
            self.verified.touch()


def test_every_stage_that_may_take_long_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Each goes on when it has been reported on."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.002)
    monkeypatch.setenv("REPORTED", str(tmp_path / "reported"))
    learn, heard = LocalBackend.learn, Heard(tmp_path / "reported")

    def reported_learn(*arguments: Any) -> Any:
        wait_until(lambda: any(line.startswith("train 0: ") for line in slow_workflow.SAID), "a line about training")
        return learn(*arguments)

    monkeypatch.setattr(LocalBackend, "learn", reported_learn)
    reward = {"verifier": "slow_reward:reported_digits", "timeout_seconds": 3600}
    slow = {"reward": reward, "workflow": {"name": "slow_workflow:ReportedTurn"}}
    logging.getLogger(LOGGER).addHandler(heard)
    try:
        with caplog.at_level(logging.INFO, LOGGER):
            drive(tmp_path, "r", tiny(schedule={"iterations": 1}, **slow))
    finally:
        logging.getLogger(LOGGER).removeHandler(heard)
    said = lines_of(caplog)
    reported_by = {line.split(":")[0] for line in said}
    assert {"rollout 0", "verify 0", "train 0", "evaluate version 0"} <= reported_by
    for line in said:
        done, of = re.search(r": (\d+) of (\d+) (?:samples|verdicts) ", line).groups()  # type: ignore[union-attr]
        assert 0 <= int(done) <= int(of) == (8 if line.startswith("evaluate") else 16)
    assert any(re.match(r"verify 0: [1-9]", line) for line in said)
