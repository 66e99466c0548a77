"""What a run waits for, on its page and in `arealflow runs`: while it lasts, when it has ended, and after kill -9."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_api import ask
from stage_driver import left_over, start_marked, store_in, tiny
from waiting import wait_until

from areal_tasks.engines.watchdog import Waited, Watchdog
from areal_tasks.store.backend import Unavailable
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import load_run
from areal_tasks.store.waits import current_waits, waits_record, write_waits
from flows import waits as shown
from flows.artifacts import Artifacts
from flows.background import RepeatedWork
from flows.cli.inspect import runs as list_runs
from flows.cli.inspect import waits_text
from flows.cli.main import main
from flows.rlhf import rlhf
from schemas.manifest import Wait
from schemas.recipe.recipe import RlhfRecipe


def recipe(folder: Path) -> RlhfRecipe:
    made = tiny(
        reward={"verifier": "gated_reward:gated", "timeout_seconds": 3600},
        schedule={"iterations": 1, "artifact_every": 100},
        launcher={"warn_seconds": 0.4},
        store={"url": store_in(folder).url},
    )
    assert isinstance(made, RlhfRecipe)
    return made


def flow_process(folder: Path, name: str) -> None:
    """The flow in a process of its own, which shows at once what it waits for."""
    shown.SHOWN_SECONDS, shown.Waits.seconds = 0.5, 0.1  # type: ignore[misc]
    rlhf(recipe(folder), run=name)


def page(api: str, name: str) -> str:
    query = {"artifacts": {"key": {"any_": [f"{name}-waits"]}}}
    found = ask("POST", f"{api}/artifacts/latest/filter", query).raise_for_status().json()
    return str(found[0]["data"]) if found else ""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tests = Path(__file__).parent
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
    (tmp_path / "gate").touch()
    return tmp_path / "gate"


def test_what_a_run_waits_for_is_shown_until_it_ends_or_its_process_does(
    api: str, tmp_path: Path, gate: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, store = "shows-its-waits", store_in(tmp_path)
    capsys.readouterr()

    def runs(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["arealflow", "runs", "--store", store.url, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    def waits() -> list[dict[str, Any]]:
        [row] = json.loads(runs("--json"))
        found: list[dict[str, Any]] = row["waits"]
        return found

    def verifiers() -> list[dict[str, Any]]:
        return [wait for wait in waits() if wait["at"] == "the verifiers"] if store.exists(f"{name}/run.json") else []

    killed = start_marked(tmp_path, flow_process, tmp_path, name)
    [wait] = wait_until(verifiers, "the wait for verdicts")
    assert (wait["what"], wait["limit"]) == ("verdicts", "reward.wall_seconds for each")
    assert " the verifiers: verdicts" in " ".join(runs().split())
    wait_until(lambda: "## the verifiers\n\nverdicts, since " in page(api, name), "the page")
    killed.kill()
    killed.join()
    assert waits() == []
    wait_until(lambda: not left_over(tmp_path))

    gate.unlink()
    start_marked(tmp_path, flow_process, tmp_path, name).join()
    assert load_run(store, name).head() and current_waits(load_run(store, name)) is None
    assert "Nothing for longer than" in page(api, name)


class Pages(list[Callable[[], object]]):
    """What is offered as an artifact, and the pages that come of it."""

    def offer(self, what: str, make: Callable[[], object]) -> None:
        self.append(make)

    def show(self, kind: str, page: str, *_: str) -> None:
        self.made = page

    def last(self) -> str:
        self[-1]()
        return self.made


LOG = logging.getLogger("run")
WAITED = Waited("trainer", "/train of version 3", 25.0, "none", "3 of 4")


def test_what_lasts_is_told_of_again_ever_more_rarely_but_in_time(tmp_path: Path) -> None:
    run, pages, now = open_run(store_in(tmp_path), "r", recipe(tmp_path)), Pages(), 0.0
    waits = shown.Waits(run, cast(Watchdog, None), cast(Artifacts, pages), LOG, lambda: now)
    due = math.inf
    for _ in range(720):
        before = len(pages)
        waits.report([WAITED])
        if len(pages) > before:
            assert now <= due + shown.Waits.seconds
            record = current_waits(run)
            assert record is not None and record.waits[0].what == WAITED.what
            due = now + record.seconds
        now += shown.Waits.seconds
    assert len(pages) < 20 and now < due + shown.Waits.seconds
    waits.report([])
    waits.report([])
    assert current_waits(run) is None and "Nothing" in pages.last()


def test_the_page_tells_of_a_store_that_takes_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, pages = open_run(store_in(tmp_path), "r", recipe(tmp_path)), Pages()
    waits = shown.Waits(run, cast(Watchdog, None), cast(Artifacts, pages), LOG)
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "create", away)
        waits.report([WAITED])
    assert "3 of 4" in pages.last() and current_waits(run) is None
    waits.report([WAITED])
    assert current_waits(run) is not None


def away(*_: object) -> None:
    raise Unavailable("the store is away")


def test_what_is_repeated_logs_with_the_settings_of_its_flow() -> None:
    """Without them Prefect would send the line to another server, and would start one for it."""

    class Failing(RepeatedWork):
        seconds = 0.01
        what = "figures"

        def repeat(self) -> None:
            raise OSError

    servers: list[str] = []
    log = SimpleNamespace(warning=lambda *_: servers.append(PREFECT_API_URL.value()))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}), Failing(log):
        wait_until(lambda: servers)
    assert servers == ["http://127.0.0.1:1/api"]


def test_of_another_machine_s_flow_it_is_told_by_whose_clock_it_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(store_in(tmp_path), "r", recipe(tmp_path))
    waits = [Wait(at="trainer", what="/train", since="2026-01-01T10:00:00+00:00", limit="", says="")] * 2
    record = waits_record(waits, 30.0)
    assert waits_text(record) == "since 2026-01-01 10:00:00 UTC (and 1 more) trainer: /train"
    elsewhere = record.model_copy(update={"host": "node7", "told": "2026-01-01T10:05:00+00:00"})
    write_waits(run, 1, elsewhere)
    list_runs(run.store.url, as_json=True)
    [row] = json.loads(capsys.readouterr().out)
    assert (len(row["waits"]), row["reported"], row["reported_by"]) == (2, elsewhere.told, "node7")
    as_of = "(and 1 more), as of 2026-01-01 10:05:00 UTC by the clock of node7, trainer: /train"
    assert waits_text(elsewhere).endswith(as_of)
