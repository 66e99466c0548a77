"""What dies is restarted, what no process reports is found, and what keeps crashing is given up."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.exceptions import TerminationSignal
from prefect_api import ask
from waiting import alive, wait_until

from flows.cli import automations, keeper, machine
from flows.cli.processes import FLOW_RUN, POOL, end, flow_processes, parts, spawn
from flows.execute import ending_action

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


def test_more_flow_runs_than_prefect_answers_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, 3, keeper.PAGE, 2 * keeper.PAGE + 50):
        there = [{"id": str(n)} for n in range(number)]

        def page(method: str, url: str, query: dict[str, Any], there: list[Any] = there) -> list[Any]:
            return there[query["offset"] :][: query["limit"]]

        monkeypatch.setattr(keeper, "_answer", page)
        assert keeper.find_flow_runs("http://x", "CRASHED") == there


# ── the keeper ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[keeper.Keeper]:
    """A keeper whose server and worker are processes that only sleep."""
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(keeper, "python", lambda module: [*SLEEPER, module])
    monkeypatch.setattr(keeper, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(httpx, "get", lambda url, timeout: httpx.Response(200, request=httpx.Request("GET", url)))
    kept = keeper.Keeper("http://127.0.0.1:1/api", threading.Event())
    monkeypatch.setattr(kept.flow_runs, "check", lambda: None)
    kept.poll()
    kept.poll()
    yield kept
    end(parts("server", "worker"))


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_killed_process_is_started_again(sleepers: keeper.Keeper, victim: str) -> None:
    before = {"server": sleepers.server.processes, "worker": sleepers.worker.processes}
    [dead] = before[victim]
    dead.kill()
    wait_until(lambda: not alive(dead))
    sleepers.poll()
    wait_until(lambda: parts(victim) not in ([], [dead]))
    [other] = {"server", "worker"} - {victim}
    assert parts(other) == before[other]


def test_the_flow_processes_of_a_dead_worker_end_with_it(
    sleepers: keeper.Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FLOW_GRACE_SECONDS", 0.5)
    sleeps = "print(flush=True); import time; time.sleep(3600)"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleeps}"
    ours = os.environ | {FLOW_RUN: "an id"}
    theirs = ours | {"AREALFLOW_HOME": str(tmp_path / "elsewhere")}
    marked = [psutil.Popen([sys.executable, "-c", code], env=ours, stdout=-1) for code in (stubborn, sleeps)]
    other = psutil.Popen([sys.executable, "-c", sleeps], env=theirs, stdout=-1)
    for process in (*marked, other):
        process.stdout.readline()
    assert set(flow_processes()) == set(marked)
    [worker] = sleepers.worker.processes
    worker.kill()
    wait_until(lambda: not alive(worker))
    sleepers.poll()
    wait_until(lambda: not any(map(alive, marked)))
    assert other.poll() is None
    other.kill()


def test_the_keeper_goes_on_after_a_poll_that_failed(
    sleepers: keeper.Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "keeper")
    monkeypatch.setattr(keeper, "POLL_SECONDS", 0.01)
    start, full = keeper.spawn, [OSError(28, "No space left on device")]

    def fails_once(*part: Any) -> psutil.Process:
        if full:
            raise full.pop()
        return start(*part)

    def answers_no_json() -> None:
        sleepers.stopped.set()
        raise ValueError("no JSON")

    monkeypatch.setattr(keeper, "spawn", fails_once)
    monkeypatch.setattr(sleepers.flow_runs, "check", answers_no_json)
    [dead] = sleepers.worker.processes
    dead.kill()
    wait_until(lambda: not alive(dead))
    sleepers()
    assert sleepers.worker.runs()
    ends = [caplog.text.find(said) for said in ("No space left on device", "polls succeed again", "no JSON")]
    assert -1 < ends[0] < ends[1] < ends[2]


def test_what_dies_soon_after_its_start_waits(sleepers: keeper.Keeper) -> None:
    [dead] = sleepers.worker.processes
    dead.kill()
    wait_until(lambda: not alive(dead))
    began, sleepers.worker.due = time.monotonic(), time.monotonic() + 0.5
    sleepers.poll()
    assert time.monotonic() - began >= 0.5 and sleepers.worker.runs()
    sleepers.stopped.set()
    end(sleepers.worker.processes)
    sleepers.poll()
    assert not sleepers.worker.runs()


def test_down_stops_the_keeper_before_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    url = "http://127.0.0.1:1/api"
    kept = [spawn("server", SLEEPER, url), spawn("worker", SLEEPER, url)]
    kept.append(spawn("keeper", [sys.executable, "-m", machine.KEEPER], url))
    wait_until(lambda: "watching" in (tmp_path / "logs" / "keeper.log").read_text())
    machine.down()
    assert not any(map(alive, kept)) and not parts("server", "worker", "keeper")
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
        automations.install(api)
        flow = self.ask("/flows/", {"name": "crashes"})["id"]
        deployment = {"name": "crashes", "flow_id": flow, "work_pool_name": POOL, "parameters": {}}
        self.deployment = self.ask("/deployments/", deployment)["id"]

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", f"{self.api}{path}", body).raise_for_status().json()

    def flow_run(self) -> str:
        state = {"type": "SCHEDULED"}
        return str(self.ask(f"/deployments/{self.deployment}/create_flow_run", {"state": state})["id"])

    def set(self, run: str, kind: str) -> None:
        answer = self.ask(f"/flow_runs/{run}/set_state", {"state": {"type": kind}})
        assert answer["status"] == "ACCEPT", answer

    def beat(self, run: str) -> None:
        """What a flow process sends from time to time."""
        event = {"event": "prefect.flow-run.heartbeat", "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"}}
        now = {"id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat()}
        ask("POST", f"{self.api}/events", [event | now]).raise_for_status()

    def state(self, run: str) -> tuple[str, str]:
        state = ask("GET", f"{self.api}/flow_runs/{run}").raise_for_status().json()["state"]
        return state["name"], state["message"] or ""

    def enable(self, on: bool) -> None:
        """Switch the recovery of crashed flow runs."""
        there = automations.find(self.api, automations.RECOVERY)
        assert there is not None
        ask("PATCH", f"{self.api}/automations/{there['id']}", {"enabled": on}).raise_for_status()


@pytest.fixture(scope="module")
def server(api: str) -> Server:
    return Server(api)


def test_the_automation_runs_a_crashed_flow_run_again(server: Server) -> None:
    """On a server without a keeper; where there is one, the automation is but its switch."""
    automations.put(server.api, automations.read_automation("recovery"))
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(run, kind)
    wait_until(lambda: server.state(run)[0] == "AwaitingRetry")
    assert automations.RECOVERY in server.state(run)[1]
    server.set(run, "CANCELLED")
    automations.install(server.api)


def test_a_flow_run_that_is_no_longer_heard_of_counts_as_crashed(server: Server) -> None:
    """One whose heartbeats end, not one that has ended or of which there never was a heartbeat."""
    lost = automations.read_automation("lost")
    automations.put(server.api, {**lost, "trigger": {**lost["trigger"], "within": 10}})
    silent, ended, unknown = runs = [server.flow_run() for _ in range(3)]
    for run in runs:
        for kind in ("PENDING", "RUNNING"):
            server.set(run, kind)
    for run in (silent, ended):
        server.beat(run)
    server.set(ended, "COMPLETED")
    wait_until(lambda: server.state(silent)[0] == "Crashed")
    assert "Nothing was heard of it any more" in server.state(silent)[1]
    assert [server.state(run)[0] for run in (ended, unknown)] == ["Completed", "Running"]
    automations.remove(server.api, lost["name"])
    server.set(unknown, "CANCELLED")


def test_a_crashed_flow_run_is_run_again_unless_a_person_has_switched_that_off(server: Server) -> None:
    there = automations.find(server.api, automations.RECOVERY)
    assert there is not None
    flow_runs = keeper.FlowRuns(server.api)
    server.enable(False)
    automations.install(server.api)
    again = automations.find(server.api, automations.RECOVERY)
    assert again is not None and again["id"] == there["id"] and not again["enabled"]
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(run, kind)
    flow_runs.check()
    assert server.state(run)[0] == "Crashed"
    server.enable(True)
    flow_runs.check()
    assert server.state(run) == ("AwaitingRetry", "Crashed; run again by the keeper of `arealflow up`")
    server.set(run, "CANCELLED")


def test_a_flow_run_without_a_process_is_found_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, cancelled, lively = server.flow_run(), server.flow_run(), server.flow_run()
    for run in (lost, cancelled, lively):
        server.set(run, "PENDING")
        server.set(run, "RUNNING")
    server.set(cancelled, "CANCELLING")
    monkeypatch.setattr(keeper, "flow_processes", lambda: {psutil.Process(): lively})
    monkeypatch.setattr(keeper, "GONE_SECONDS", dict.fromkeys(keeper.GONE_SECONDS, 1800.0))
    flow_runs = keeper.FlowRuns(server.api)
    flow_runs.check()
    flow_runs.check()
    assert server.state(lost)[0] == "Running"
    flow_runs.gone = {state: since - 3600.0 for state, since in flow_runs.gone.items()}
    flow_runs.check()
    assert server.state(cancelled)[0] == "Cancelled" and server.state(lively)[0] == "Running"
    assert server.state(lost) == ("Crashed", "The flow run's process is gone and no worker has reported it.")
    flow_runs.check()
    assert server.state(lost)[0] == "AwaitingRetry"
    for run in (lost, lively):
        server.set(run, "CANCELLED")


def test_crashes_count_from_the_first_keeper_since_the_last_down(server: Server) -> None:
    earlier, later = server.flow_run(), server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(earlier, kind)
    keeper.FlowRuns(server.api)
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(later, kind)
    keeper.FlowRuns(server.api).check()  # of a keeper that was started again
    assert server.state(earlier)[0] == "Crashed" and server.state(later)[0] == "AwaitingRetry"
    server.set(later, "CANCELLED")
    keeper.since_file().unlink()  # as `down` does
    before = time.time() - 1.0
    assert before <= keeper.FlowRuns(server.api).since <= time.time()


def test_a_clock_that_is_set_back_hides_no_crash(server: Server) -> None:
    ahead = time.time() + 3600.0
    keeper.watching_since()
    os.utime(keeper.since_file(), (ahead, ahead))  # `up` began before the clock was set back
    flow_runs = keeper.FlowRuns(server.api)
    flow_runs.check()
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CRASHED"):
        server.set(run, kind)
    flow_runs.check()
    assert server.state(run)[0] == "AwaitingRetry"
    server.set(run, "CANCELLED")


def test_a_flow_run_that_crashes_at_once_is_not_run_again_for_ever(server: Server) -> None:
    run = server.flow_run()
    flow_runs = keeper.FlowRuns(server.api)
    for crash in range(keeper.CRASHES):
        server.set(run, "PENDING")
        server.set(run, "CRASHED")
        flow_runs.check()
        name, message = server.state(run)
        assert name == ("Failed" if crash == keeper.CRASHES - 1 else "AwaitingRetry")
    assert "Crashed 5 times in a row and committed nothing meanwhile" in message


def test_a_flow_run_that_its_worker_does_not_end_is_cancelled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = server.flow_run()
    for kind in ("PENDING", "RUNNING", "CANCELLING"):
        server.set(run, kind)
    flow, other = (psutil.Popen(SLEEPER, env=os.environ | {FLOW_RUN: name}) for name in (run, "other"))
    wait_until(lambda: len(flow_processes()) == 2)
    flow_runs = keeper.FlowRuns(server.api)
    flow_runs.check()
    assert flow.poll() is None and server.state(run)[0] == "Cancelling"
    monkeypatch.setattr(keeper, "STUCK_SECONDS", 0.0)  # as after some time
    flow_runs.check()
    assert not alive(flow) and other.poll() is None
    monkeypatch.setattr(keeper, "GONE_SECONDS", dict.fromkeys(keeper.GONE_SECONDS, 0.0))
    flow_runs.check()
    assert server.state(run)[0] == "Cancelled"
    other.kill()
    other.wait()


def test_what_crashed_while_it_was_cancelled_is_not_run_again(server: Server) -> None:
    run = server.flow_run()
    flow_runs = keeper.FlowRuns(server.api)
    for kind in ("PENDING", "RUNNING", "CANCELLING"):
        server.set(run, kind)
    server.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CRASHED"}, "force": True})
    flow_runs.check()
    assert server.state(run) == ("Cancelled", "It crashed while it was being cancelled.")


def test_a_signal_means_what_the_flow_runs_state_says(server: Server) -> None:
    run = server.flow_run()
    for kind, ended in (("PENDING", "interrupted"), ("RUNNING", "interrupted"), ("CANCELLING", "cancelled")):
        server.set(run, kind)
        assert ending_action(TerminationSignal(signal.SIGTERM), run) == ended
    server.set(run, "CANCELLED")
    assert ending_action(KeyboardInterrupt(), run) == "cancelled"


def test_only_crashes_without_another_end_between_count() -> None:
    kinds = ["CRASHED", "SCHEDULED", "RUNNING", "FAILED", "SCHEDULED", "CRASHED", "SCHEDULED", "CRASHED"]
    states = [{"timestamp": f"2026-01-01T00:00:0{i}Z", "type": kind} for i, kind in enumerate(kinds)]
    assert keeper.crashes_in_a_row(states) == (["2026-01-01T00:00:05Z", "2026-01-01T00:00:07Z"], "SCHEDULED")
