"""A stage of minutes says in the log how far it is; a stage of seconds says nothing."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
from stage_driver import drive, tiny

from areal_tasks.stages import progress
from areal_tasks.stages.progress import progress_line, reported

LOGGER = "areal_tasks.stages.progress"


def test_a_line_holds_share_rate_and_what_is_left() -> None:
    line = progress_line("rollout 3", "samples", 96, 512, 30.0)
    assert line == "rollout 3: 96 of 512 samples (19%) after 30 s, 3.2 a second, about 130 s left"
    assert progress_line("train 0", "samples", 0, 1024, 60.0) == "train 0: 0 of 1,024 samples (0%) after 60 s"


def test_lines_follow_each_other_until_the_stage_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.02)
    calls: list[int] = []

    def count() -> tuple[int, int]:
        calls.append(len(calls))
        return len(calls), 100

    with caplog.at_level(logging.INFO, LOGGER), reported("verify 1", "verdicts", count):
        while len(calls) < 3:
            time.sleep(0.01)
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert [int(re.search(r"(\d+) of 100 verdicts", line)[1]) for line in said] == list(range(1, len(said) + 1))  # type: ignore[index]
    after = len(calls)
    time.sleep(0.1)
    assert len(calls) == after, "the reporter goes on after the stage"


def test_a_short_stage_and_one_of_which_nothing_is_known_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        with reported("rollout 0", "samples", lambda: (1, 2)):
            pass
        monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
        with reported("train 0", "samples", lambda: (0, 0)):
            time.sleep(0.05)
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_every_stage_that_may_take_long_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.002)
    slow = {"reward": {"verifier": "slow_reward:slow_digits"}, "workflow": {"name": "slow_workflow:SlowTurn"}}
    with caplog.at_level(logging.INFO, LOGGER):
        drive(tmp_path, "r", tiny(schedule={"iterations": 1}, **slow))
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    reported_by = {line.split(":")[0] for line in said}
    assert {"rollout 0", "verify 0", "train 0", "evaluate version 0"} <= reported_by
    for line in said:
        done, of = re.search(r": (\d+) of (\d+) (?:samples|verdicts) ", line).groups()  # type: ignore[union-attr]
        assert 0 <= int(done) <= int(of) == (8 if line.startswith("evaluate") else 16)
    assert any(re.match(r"verify 0: [1-9]", line) for line in said)
