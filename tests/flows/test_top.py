"""`arealflow top`: one table of the newest sample, also while nothing more comes, and how the flow ended."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from stage_driver import store_in, tiny

from areal_tasks.store import paths
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import Run
from areal_tasks.store.system import SystemLog
from flows.cli import services
from flows.cli.main import main

ROW = {"service": "trainer", "busy": 0.4, "doing": "", "waits_for": "groups", "state_seconds": 7.2, "cpu": 1.5}


def called(run: Run, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["arealflow", "top", run.name, "--store", run.store.url, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def written(run: Run, *rows: dict[str, Any]) -> None:
    log = SystemLog(run)
    log.add([ROW | {"owner": run.owner, "host": "node", "memory": 5_000_000, **row} for row in rows])
    log.write()


def test_the_newest_sample_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "FRESH_SECONDS", 0.0)
    run = open_run(store_in(tmp_path), "r", tiny())
    early, late = datetime(2026, 1, 1, 10), datetime(2026, 1, 1, 11, 4, 31)
    written(run, {"time": early, "busy": 0.1}, {"time": late, "running": 3, "at_once": 8})
    called(run, monkeypatch)
    text = " ".join(capsys.readouterr().out.split())
    assert "run r · start 1 · sampled 11:04:31 UTC" in text and "40 %" in text and "10 %" not in text
    assert "waits for groups" in text and "7 s" in text and "150 %" in text and "5.0 MB" in text and "3 of 8" in text
    assert run.store.exists(paths.watch("r", 1, 1))


def test_the_flow_is_first_and_services_are_in_order_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "FRESH_SECONDS", 0.0)
    run = open_run(store_in(tmp_path), "r", tiny())
    wanted = ["flow", "inference-2", "inference-2.1", "inference-10", "inference-10.1", "rollout-0", "trainer"]
    written(run, *({"time": datetime(2026, 1, 1), "service": name} for name in reversed(wanted)))
    called(run, monkeypatch, "--json")
    assert [row["service"] for row in json.loads(capsys.readouterr().out)] == wanted


def test_after_the_end_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "POLL_SECONDS", 1e9)  # a wait would last for ever
    run = open_run(store_in(tmp_path), "r", tiny())
    written(run, {"time": datetime(2026, 1, 1)})
    append_log(run.store, "r", "finished", {"owner": 1})
    called(run, monkeypatch)
    assert "finished at " in " ".join(capsys.readouterr().out.split())
    called(run, monkeypatch, "--json")
    [row] = json.loads(capsys.readouterr().out)
    assert (row["service"], row["waits_for"]) == ("trainer", "groups")
    assert not run.store.exists(paths.watch("r", 1, 1))
