"""What a start of a run reports of the wait for its first iteration."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from stage_driver import store_in, tiny
from waiting import alive, wait_until

from areal_tasks.stages.jobs import IterationResult
from areal_tasks.store.backend import StoreError
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import service
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from flows import startup
from flows.startup import Startup, describe, process_began, start_timing, step_seconds
from schemas.manifest import ServiceRecord

NOTHING = IterationResult(0, 1, {}, 0.1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    found = logging.getLogger("startup")
    monkeypatch.setattr(startup, "get_run_logger", lambda: found)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recipe = tiny()
    return open_run(store_in(tmp_path), "r", recipe)


def test_the_times_between_marks_add_up() -> None:
    marks = [("", 10.0), ("imports", 14.0), ("Prefect", 15.0), ("imports", 17.0), ("checks", 17.5)]
    assert step_seconds(marks) == {"imports": 6.0, "Prefect": 1.0, "checks": 0.5}
    assert step_seconds(marks[:1]) == step_seconds([]) == {}


def test_the_line_says_what_the_wait_was_for() -> None:
    times = {"seconds": 23.41, "imports": 5.1, "checks": 0.01, "rollout": 12.0, "trainer ready": 9.2}
    assert describe(times) == "first iteration after 23.4 s: imports 5.1, rollout 12.0; trainer ready after 9.2 s"
    assert describe({"seconds": 1.0}) == "first iteration after 1.0 s: "


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """A process that began at 100 s, and has imported everything."""
    marks = [("", 100.0), ("imports", 104.0)]
    monkeypatch.setattr(startup, "_marks", marks)
    monkeypatch.setattr(startup, "_flows", [])
    return marks


def test_the_first_start_of_a_process_begins_with_the_process(process: list[tuple[str, float]]) -> None:
    start_timing(nested=False)
    start_timing(nested=True)  # as an SFT run that a recipe begins with
    first = Startup()
    assert (first.began, first.before["imports"]) == (100.0, 4.0)
    assert first.before.keys() == {"imports", "Prefect", "checks"}
    later = time.time()
    assert Startup().began >= later, "the run that the SFT run was for"


def test_a_later_flow_of_a_process_begins_by_itself(process: list[tuple[str, float]]) -> None:
    start_timing(nested=False)  # and fails before its run starts
    later = time.time()
    start_timing(nested=False)
    second = Startup()
    assert second.began >= later and second.before.keys() == {"checks"}


@pytest.mark.usefixtures("process")
def test_it_is_reported_once_and_can_be_queried(
    run: Run, log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    report = Startup()
    started = datetime.fromtimestamp(report.began + 2.5, UTC).isoformat()
    record = ServiceRecord(name="trainer", restart=0, url="http://x", host="h", pid=1, started=started)
    run.store.create(path := service("r", run.owner, "trainer", 0), record.encode(path))
    for _ in range(2):
        report(run, NOTHING, ["trainer", "inference-0"], "flow-run-1")
    [line] = read_log(run.store, "r")
    assert (line.action, line.prefect_flow_run_id) == ("first iteration", "flow-run-1")
    assert line.details["trainer ready"] == 2.5 and "inference-0 ready" not in line.details
    [message] = caplog.messages
    assert message.startswith("first iteration after ") and message.endswith("trainer ready after 2.5 s")
    query = "SELECT details['trainer ready']::DOUBLE AS ready FROM log WHERE action = 'first iteration'"
    assert run_sql(run.store, "r", query).to_pylist() == [{"ready": 2.5}]


def test_a_store_that_refuses_the_line_does_not_end_the_run(
    run: Run, log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(startup, "append_log", refuse)
    Startup()(run, NOTHING, [])
    assert "the run's log could not be written: the disk is full" in caplog.messages


def test_when_this_process_began() -> None:
    assert abs(process_began() - psutil.Process().create_time()) < 1.5, "which is rounded to a second"
    assert process_began() < time.time()


@pytest.mark.slow("a Prefect server of its own; what it does is tested with the server of all tests")
def test_the_command_with_a_server_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "small.json"
    recipe.write_text(tiny(schedule={"iterations": 1}, reward={"verifier": "exact"}).model_dump_json())  # JSON is YAML
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"AREALFLOW_HOME": str(tmp_path / "home"), "AREALFLOW_STORE": store_in(tmp_path).url}
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "run", str(recipe), "run=r"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        f"run r: 1 iterations in {store_in(tmp_path).url}\nread it: arealflow report r\n",
    ), done.stderr
    assert re.search(r"first iteration after [\d.]+ s: imports [\d.]+, .*; trainer ready after", done.stderr)
    times = next(line.details for line in read_log(store_in(tmp_path), "r") if line.action == "first iteration")
    assert {"imports", "Prefect", "checks", "initialise", "rollout", "inference-0 ready"} <= times.keys()
    with sqlite3.connect(tmp_path / "home" / "prefect" / "prefect.db") as database:
        states = database.execute("SELECT DISTINCT state_type FROM flow_run UNION SELECT state_type FROM task_run")
        assert states.fetchall() == [("COMPLETED",)]
        [(last,)] = database.execute("SELECT message FROM log ORDER BY timestamp DESC LIMIT 1")
        assert last == "Finished in state Completed()", "what was logged last reached the server before it ended"
    wait_until(
        lambda: not any(str(tmp_path) in " ".join(environment_of(process)) for process in psutil.process_iter()),
        "the end of all that it started",
    )


def environment_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.environ().values()) if alive(process) else []
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
