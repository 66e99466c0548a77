"""What dies is started again, what nobody reports is found, and what keeps crashing is given up."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.exceptions import TerminationSignal
from prefect_api import ask
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.store.backend import Unavailable
from flows.cli import automations, keeper, machine, upkeep
from flows.execute import ended_as
from flows.patience import LONGEST_PAUSE_SECONDS, WAIT_SECONDS, Patience

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


# ── the keeper ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[keeper.Keeper]:
    """A keeper whose server and worker are processes that only sleep."""
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "start_server", lambda url: machine._spawn("server", SLEEPER, url))
    monkeypatch.setattr(machine, "spawn_worker", lambda url: machine._spawn("worker", SLEEPER, url))
    monkeypatch.setattr(machine, "wait_for_api", lambda url, give_up: True)
    url = "http://127.0.0.1:1/api"
    watched = machine.Machine(url, machine.start_server(url), machine.spawn_worker(url), machine.started(os.getpid()))
    kept = keeper.Keeper(watched, threading.Event())
    yield kept
    for process in (kept.machine.server, kept.machine.worker):
        machine.stop(process)


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_killed_process_is_started_again_and_written_down(sleepers: keeper.Keeper, victim: str) -> None:
    before = sleepers.machine
    dead = getattr(before, victim)
    os.kill(dead.pid, signal.SIGKILL)
    wait_until(lambda: not machine.alive(dead))
    sleepers.poll()
    after = machine.read()
    assert after == sleepers.machine and machine.alive(getattr(after, victim)) and getattr(after, victim) != dead
    other = "worker" if victim == "server" else "server"
    assert getattr(after, other) == getattr(before, other)


def test_the_flow_processes_of_a_dead_worker_end_with_it(
    sleepers: keeper.Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FLOW_GRACE_SECONDS", 0.5)
    sleeps = "print(flush=True); import time; time.sleep(3600)"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleeps}"
    ours = os.environ | {upkeep.FLOW_RUN: "an id"}
    theirs = ours | {"AREALFLOW_HOME": str(tmp_path / "elsewhere")}
    marked = [psutil.Popen([sys.executable, "-c", code], env=ours, stdout=-1) for code in (stubborn, sleeps)]
    other = psutil.Popen([sys.executable, "-c", sleeps], env=theirs, stdout=-1)
    for process in (*marked, other):
        process.stdout.readline()
    assert set(upkeep.flow_processes()) == {process.pid for process in marked}
    os.kill(sleepers.machine.worker.pid, signal.SIGKILL)
    wait_until(lambda: not machine.alive(sleepers.machine.worker))
    sleepers.poll()
    wait_until(lambda: not any(map(alive, marked)))
    assert other.poll() is None
    other.kill()


def test_the_keeper_goes_on_after_a_look_that_failed(
    sleepers: keeper.Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.01)
    dead, write, full = sleepers.machine.worker, machine.write, [OSError(28, "No space left on device")]

    def fails_once(renewed: machine.Machine) -> None:
        if full:
            raise full.pop()
        write(renewed)

    def answers_no_json() -> None:
        sleepers.stopped.set()
        raise ValueError("no JSON")

    monkeypatch.setattr(machine, "write", fails_once)
    monkeypatch.setattr(sleepers, "upkeep", answers_no_json)
    os.kill(dead.pid, signal.SIGKILL)
    wait_until(lambda: not machine.alive(dead))
    sleepers()
    assert machine.read() == sleepers.machine and machine.alive(sleepers.machine.worker)
    assert "No space left on device" in caplog.text and "no JSON" in caplog.text


def test_what_keeps_dying_is_started_ever_more_rarely() -> None:
    backoff = keeper.Backoff(started=time.monotonic() + 3600.0)
    assert [backoff.delay() for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    backoff.started = time.monotonic() - keeper.STEADY_SECONDS
    assert backoff.delay() == 0.0


def test_down_stops_the_keeper_before_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    url = "http://127.0.0.1:1/api"
    server, worker = machine._spawn("server", SLEEPER, url), machine._spawn("worker", SLEEPER, url)
    machine.write(machine.Machine(url, server, worker))
    kept = machine._spawn("keeper", [sys.executable, "-m", machine.KEEPER], url)
    machine.write(machine.Machine(url, server, worker, kept))
    wait_until(lambda: "watching" in (tmp_path / "logs" / "keeper.log").read_text())
    machine.down()
    assert not any(machine.alive(process) for process in (server, worker, kept))
    assert machine.read() is None


def test_down_ends_what_is_left_when_a_part_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    url = "http://127.0.0.1:1/api"
    server, gone = machine._spawn("server", SLEEPER, url), machine.Started(os.getpid(), 0.0)
    flow = psutil.Popen(SLEEPER, env=os.environ | {upkeep.FLOW_RUN: "an id"})
    machine.write(machine.Machine(url, server, gone))
    wait_until(lambda: flow.pid in upkeep.flow_processes())
    assert machine.running() is None
    assert machine.alive(server) and flow.poll() is None and machine.read() is not None
    machine.down()
    assert not machine.alive(server) and flow.poll() is not None
    machine.down()
    printed = capsys.readouterr().out
    assert printed.count("stopped\n") == 1 and printed.endswith("nothing is running\n")


# ── flow runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))


class Server:
    """A flow run of the work pool on the real server, whose states a test sets and reads."""

    def __init__(self, api: str) -> None:
        self.api = api
        machine.prefect(["work-pool", "create", machine.POOL, "--type", "process", "--overwrite"], api)
        automations.install(api)
        flow = self.ask("/flows/", {"name": "crashes"})["id"]
        deployment = {"name": "crashes", "flow_id": flow, "work_pool_name": machine.POOL, "parameters": {}}
        self.deployment = self.ask("/deployments/", deployment)["id"]

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", f"{self.api}{path}", body).raise_for_status().json()

    def flow_run(self) -> str:
        state = {"type": "SCHEDULED"}
        return str(self.ask(f"/deployments/{self.deployment}/create_flow_run", {"state": state})["id"])

    def set(self, run: str, kind: str) -> None:
        answer = self.ask(f"/flow_runs/{run}/set_state", {"state": {"type": kind}})
        assert answer["status"] == "ACCEPT", answer

    def state(self, run: str) -> tuple[str, str]:
        state = ask("GET", f"{self.api}/flow_runs/{run}").raise_for_status().json()["state"]
        return state["name"], state["message"] or ""

    def has_heard(self, run: str, kind: str) -> bool:
        """Whether the event of that state has come, and been dealt with."""
        since = datetime.now(UTC) - timedelta(days=1)
        which = {"event": {"name": [f"prefect.flow-run.{kind}"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
        return bool(
            self.ask("/events/filter", {"filter": {**which, "occurred": {"since": since.isoformat()}}})["events"]
        )

    def enable(self, on: bool) -> None:
        """Switch the automation that runs crashed flow runs again."""
        there = automations.find(self.api, automations.RECOVERY)
        assert there is not None
        ask("PATCH", f"{self.api}/automations/{there['id']}", {"enabled": on}).raise_for_status()


@pytest.fixture(scope="module")
def server(api: str) -> Server:
    return Server(api)


def test_the_automation_runs_a_crashed_flow_run_again(server: Server) -> None:
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(run, kind)
    wait_until(lambda: server.state(run)[0] == "AwaitingRetry")
    assert automations.RECOVERY in server.state(run)[1]
    server.set(run, "CANCELLED")


def test_an_automation_that_a_person_has_disabled_stays_so(server: Server) -> None:
    there = automations.find(server.api, automations.RECOVERY)
    assert there is not None
    server.enable(False)
    automations.install(server.api)
    again = automations.find(server.api, automations.RECOVERY)
    assert again is not None and again["id"] == there["id"] and not again["enabled"]
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(run, kind)
    look = upkeep.Upkeep(server.api, began=0.0)
    look()
    wait_until(lambda: server.has_heard(run, "Crashed"), "the event")
    assert server.state(run)[0] == "Crashed"
    server.enable(True)


def test_a_flow_run_without_a_process_is_found_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, cancelled, lively = server.flow_run(), server.flow_run(), server.flow_run()
    for run in (lost, cancelled, lively):
        server.set(run, "PENDING")
        server.set(run, "RUNNING")
    server.set(cancelled, "CANCELLING")
    monkeypatch.setattr(upkeep, "flow_processes", lambda: {1: lively})
    monkeypatch.setattr(upkeep, "GONE_SECONDS", dict.fromkeys(upkeep.GONE_SECONDS, 1800.0))
    look = upkeep.Upkeep(server.api)
    look()
    look()
    assert server.state(lost)[0] == "Running"
    look.seen_without = {key: since - 3600.0 for key, since in look.seen_without.items()}
    look()
    assert server.state(cancelled)[0] == "Cancelled" and server.state(lively)[0] == "Running"
    wait_until(lambda: server.state(lost)[0] == "AwaitingRetry")
    for run in (lost, lively):
        server.set(run, "CANCELLED")


def test_a_crash_whose_event_was_lost_is_answered_by_the_keeper(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "MISSED_SECONDS", 0.0)
    run = server.flow_run()
    look = upkeep.Upkeep(server.api)
    with without_automation(server):
        for kind in ("PENDING", "RUNNING", "CRASHED"):
            server.set(run, kind)
        monkeypatch.setattr(look, "_recovers", lambda: True)
        look()
        assert server.state(run) == ("AwaitingRetry", "Crashed; run again by the keeper of `arealflow up`")
        server.set(run, "CANCELLED")


def test_a_crash_just_before_a_keeper_begins_is_answered_too(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "MISSED_SECONDS", 0.0)
    upkeep.Upkeep(server.api)()
    run = server.flow_run()
    with without_automation(server):
        for kind in ("PENDING", "RUNNING", "CRASHED"):
            server.set(run, kind)
        look = upkeep.Upkeep(server.api)
        monkeypatch.setattr(look, "_recovers", lambda: True)
        look()
        assert server.state(run)[0] == "AwaitingRetry"
        server.set(run, "CANCELLED")
    upkeep.last_look().unlink()  # as `down` does
    before = time.time()
    assert before <= upkeep.Upkeep(server.api).began <= time.time()


@contextmanager
def without_automation(server: Server) -> Iterator[None]:
    server.enable(False)
    yield
    server.enable(True)


def test_a_flow_run_that_crashes_at_once_is_not_run_again_for_ever(server: Server) -> None:
    run = server.flow_run()
    look = upkeep.Upkeep(server.api)
    for crash in range(upkeep.CRASHES):
        server.set(run, "PENDING")
        server.set(run, "CRASHED")
        wait_until(lambda: server.state(run)[0] == "AwaitingRetry")
        look()
        name, message = server.state(run)
        assert name == ("Failed" if crash == upkeep.CRASHES - 1 else "AwaitingRetry")
    assert "Crashed 5 times in a row and committed nothing meanwhile" in message


def test_a_flow_run_that_its_worker_does_not_end_is_cancelled(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CANCELLING"):
        server.set(run, kind)
    flow, other = (psutil.Popen(SLEEPER, env=os.environ | {upkeep.FLOW_RUN: name}) for name in (run, "other"))
    wait_until(lambda: len(upkeep.flow_processes()) == 2)
    upkeep.end_cancelling(server.api, "Its worker died.", after_seconds=3600.0)
    assert flow.poll() is None and server.state(run)[0] == "Cancelling"
    monkeypatch.setattr(upkeep, "STUCK_SECONDS", 0.0)  # as after some time
    upkeep.Upkeep(server.api)()
    assert flow.wait(LIMIT) == -signal.SIGKILL and other.poll() is None
    assert server.state(run) == ("Cancelled", "Its worker has not ended it.")
    other.kill()
    other.wait()


def test_what_crashed_while_it_was_cancelled_is_not_run_again(server: Server) -> None:
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CANCELLING"):
        server.set(run, kind)
    server.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CRASHED"}, "force": True})
    wait_until(lambda: server.state(run)[0] == "AwaitingRetry")  # the automation does not know
    upkeep.Upkeep(server.api)()
    assert server.state(run) == ("Cancelled", "It crashed while it was being cancelled.")


def test_a_signal_means_what_the_flow_runs_state_says(server: Server) -> None:
    run = server.flow_run()
    for kind, ended in (("PENDING", "interrupted"), ("RUNNING", "interrupted"), ("CANCELLING", "cancelled")):
        server.set(run, kind)
        assert ended_as(TerminationSignal(signal.SIGTERM), run) == ended
    server.set(run, "CANCELLED")
    assert ended_as(KeyboardInterrupt(), run) == "cancelled"


def test_what_was_cancelled_and_runs_again_already_is_cancelled(server: Server) -> None:
    run, other = server.flow_run(), server.flow_run()
    for kind in ("PENDING", "RUNNING"):
        server.set(other, kind)
        server.set(run, kind)
    server.set(run, "CANCELLING")
    server.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CRASHED"}, "force": True})
    wait_until(lambda: server.state(run)[0] == "AwaitingRetry")
    for kind in ("PENDING", "RUNNING"):  # all of it between two looks
        server.set(run, kind)
    upkeep.Upkeep(server.api)()
    assert server.state(run) == ("Cancelling", upkeep.CANCELLED_EARLIER) and server.state(other)[0] == "Running"
    for one in (run, other):
        server.set(one, "CANCELLED")


def test_a_cancelled_flow_run_that_a_person_retries_runs() -> None:
    def history(*kinds: str, retried: str = "Crashed; run again by the automation") -> list[dict[str, str]]:
        stamps = [f"2026-01-01T00:00:0{i}Z" for i in range(len(kinds))]
        messages = [retried if kind == "SCHEDULED" else "" for kind in kinds]
        rows = zip(stamps, kinds, messages, strict=True)
        return [{"timestamp": at, "type": kind, "name": kind, "message": message} for at, kind, message in rows]

    asked = ("RUNNING", "CANCELLING", "CRASHED")
    for later in ((), ("SCHEDULED",), ("SCHEDULED", "PENDING", "RUNNING")):
        assert upkeep.crashed_while_cancelling(history(*asked, *later))
    assert not upkeep.crashed_while_cancelling(history(*asked, "SCHEDULED", "CANCELLED", "SCHEDULED"))
    assert not upkeep.crashed_while_cancelling(history(*asked, "SCHEDULED", "RUNNING", retried=""))
    assert not upkeep.crashed_while_cancelling(history("RUNNING", "CANCELLING"))


def test_only_crashes_without_another_end_between_count() -> None:
    kinds = ["CRASHED", "SCHEDULED", "RUNNING", "FAILED", "SCHEDULED", "CRASHED", "SCHEDULED", "CRASHED"]
    states = [{"timestamp": f"2026-01-01T00:00:0{i}Z", "type": kind} for i, kind in enumerate(kinds)]
    assert upkeep.crashes_in_a_row(states) == ["2026-01-01T00:00:05Z", "2026-01-01T00:00:07Z"]


# ── patience ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_was_never_there_is_a_mistake() -> None:
    with pytest.raises(Unavailable):
        Patience(known=False).pause(Unavailable("no such host"))


def test_patience_ends_where_nothing_is_committed_for_long() -> None:
    now = [float(uuid.uuid4().int % 1000)]
    patience = Patience(known=True, clock=lambda: now[0])
    pauses = [patience.pause(TrainerDown("gone")) for _ in range(6)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    now[0] += WAIT_SECONDS
    assert patience.pause(TrainerDown("gone")) == LONGEST_PAUSE_SECONDS
    patience.progressed()
    now[0] += 1.0
    assert patience.pause(TrainerDown("gone")) == 1.0
    now[0] += WAIT_SECONDS + 1.0
    with pytest.raises(TrainerDown):
        patience.pause(TrainerDown("gone"))
