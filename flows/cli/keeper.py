"""The keeper: supervises the Prefect server, the worker and the flow runs of `arealflow up`, until `down`.

It starts the worker, restarts it and the server when they die, and finds flow runs whose process is gone. It alone
decides what follows when a flow run has crashed: a retry, or the state cancelled or failed.

A killed worker leaves its flow processes behind, which no process could cancel or observe: the keeper ends them with
SIGTERM, so that they stop their services and report a crash. A flow process survives a server that is down for some
seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil

from areal_tasks.processes import alive
from flows.cli.automations import RECOVERY, ask, find
from flows.cli.processes import POOL, end, flow_processes, parts, python, spawn
from flows.home import home

log = logging.getLogger("keeper")

FlowRun = dict[str, Any]  # as Prefect's API describes it

POLL_SECONDS = 1.0
FLOW_GRACE_SECONDS = 10.0
RESTART_SECONDS = 5.0
#: Seconds after which a flow run without a process is declared lost: a living worker reports it sooner.
GONE_SECONDS = {"RUNNING": 10.0, "CANCELLING": 10.0, "PAUSED": 10.0, "PENDING": 45.0}
#: Seconds after which the worker will not end a cancelled flow run any more: it kills 7 s after asking it to end.
STUCK_SECONDS = 45.0
#: Consecutive crashes, without a committed stage in between, after which a flow run is not retried.
CRASHES: Final = 5
ENDS: Final = ("COMPLETED", "FAILED", "CANCELLED", "PAUSED")  # of a row of crashes
TIMEOUT_SECONDS = 10.0
PAGE: Final = 200  # flow runs in one answer: Prefect's limit


@dataclass
class Part:
    """A process of `arealflow up` that the keeper restarts. Running ones are adopted."""

    name: str
    command: Sequence[str]
    processes: list[psutil.Process]
    due: float = 0.0  # not to be started before

    def runs(self) -> bool:
        return any(map(alive, self.processes))

    def start(self, api_url: str, stopped: threading.Event) -> None:
        """Start it, once in RESTART_SECONDS at most; not if the keeper is stopped meanwhile."""
        delay = max(0.0, self.due - time.monotonic())
        log.warning("the %s does not run; starting it in %.1f s", self.name, delay)
        if not stopped.wait(delay):
            self.due = time.monotonic() + RESTART_SECONDS
            self.processes = [spawn(self.name, self.command, api_url)]


class Keeper:
    """Watches the server, the worker and the flow runs. `stopped` ends it between two polls, never within one."""

    def __init__(self, api_url: str, stopped: threading.Event) -> None:
        self.api_url = api_url
        self.stopped = stopped
        self.server = Part("server", server_command(api_url), parts("server"))
        self.worker = Part("worker", python("flows.worker"), parts("worker"))
        self.flow_runs = FlowRuns(api_url)

    def __call__(self) -> None:
        """Watch until stopped; a failed poll, as on a full disk or while the server is down, is retried."""
        failed = False
        while not self.stopped.wait(POLL_SECONDS):
            try:
                self.poll()
                if failed:
                    log.info("polls succeed again")
                failed = False
            except Exception as error:
                failed, away = True, isinstance(error, httpx.HTTPError)
                log.warning("this poll failed: %s", error or type(error).__name__, exc_info=not away)

    def poll(self) -> None:
        """Start what does not run, the server first, since the worker needs it. Raises httpx.HTTPError without it."""
        if not self.server.runs():
            self.server.start(self.api_url, self.stopped)
        elif not self.worker.runs():
            httpx.get(f"{self.api_url}/health", timeout=TIMEOUT_SECONDS).raise_for_status()
            ending = threading.Thread(target=end, args=(flow_processes(), FLOW_GRACE_SECONDS), daemon=True)
            self.worker.start(self.api_url, self.stopped)
            ending.start()
        else:
            self.flow_runs.check()


def server_command(api_url: str) -> list[str]:
    return [*python("prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(urlsplit(api_url).port)]


# ── flow runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def since_file() -> Path:
    """A file whose time is the start of the first keeper since the last `down`: earlier crashes are ignored."""
    return home() / "kept-since"


def watching_since() -> float:
    """The time of `since_file`, in seconds since 1970; from now on, if there is none."""
    with suppress(FileExistsError):
        since_file().touch(exist_ok=False)
    return since_file().stat().st_mtime


@dataclass
class FlowRuns:
    """The flow runs of a server's work pool, the states of which it corrects."""

    api_url: str
    since: float = field(default_factory=watching_since)
    gone: dict[str, float] = field(default_factory=dict)  # state id -> when its flow run was first without a process

    def check(self) -> None:
        """Poll once and handle what is found. Raises httpx.HTTPError while the server is down."""
        self.since = min(self.since, time.time())  # the clock may have been set back
        runs = find_flow_runs(self.api_url, *GONE_SECONDS, "CRASHED")
        processes = flow_processes() if runs else {}
        self._find_lost([run for run in runs if run["state_type"] in GONE_SECONDS and not suspended(run)], processes)
        stuck = [run["id"] for run in runs if run["state_type"] == "CANCELLING" and age(run) > STUCK_SECONDS]
        end([process for process, run in processes.items() if run in stuck], grace_seconds=0.0)
        crashed = [run for run in runs if run["state_type"] == "CRASHED" and time.time() - age(run) > self.since]
        switch = find(self.api_url, RECOVERY) if crashed else None  # in the UI: whether they are run again
        if switch and switch["enabled"]:
            for run in crashed:
                set_state(self.api_url, run, *self._after_crash(run))

    def _find_lost(self, runs: Sequence[FlowRun], processes: Mapping[psutil.Process, str]) -> None:
        """Set flow runs without a process for GONE_SECONDS to crashed, or to cancelled if they were being cancelled."""
        lost = {run["state_id"]: run for run in runs if run["id"] not in processes.values()}
        now = time.monotonic()
        self.gone = {state: self.gone.get(state, now) for state in lost}
        for state, run in lost.items():
            if now - self.gone[state] >= GONE_SECONDS[run["state_type"]]:
                kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
                set_state(self.api_url, run, kind, "The flow run's process is gone and no worker has reported it.")

    def _after_crash(self, run: FlowRun) -> tuple[str, ...]:
        """The state that follows the crash: its type, message and, if it is not the type's own, name."""
        states = _answer("GET", f"{self.api_url}/flow_run_states/?flow_run_id={run['id']}")
        crashes, before = crashes_in_a_row(states)
        if before == "CANCELLING":
            return "CANCELLED", "It crashed while it was being cancelled."
        if len(crashes) >= CRASHES:
            committed = {"state": {"name": {"any_": ["Committed"]}}, "end_time": {"after_": crashes[-CRASHES]}}
            query = {"flow_runs": {"id": {"any_": [run["id"]]}}, "task_runs": committed}
            if not _answer("POST", f"{self.api_url}/task_runs/count", query):
                why = f"Crashed {CRASHES} times in a row and committed nothing meanwhile; not retried automatically."
                return "FAILED", f"{why} Fix the cause that its log names, then retry the flow run."
        return "SCHEDULED", "Crashed; run again by the keeper of `arealflow up`", "AwaitingRetry"


def stop_flow_runs(api_url: str, message: str, seconds: float) -> None:
    """Cancel all flow runs of the pool that have a process or soon will; wait until they end, at most `seconds`.

    httpx.HTTPError if the server does not answer.
    """
    for run in find_flow_runs(api_url, "RUNNING", "PENDING", "PAUSED", "SCHEDULED"):
        if not suspended(run) and (run["state_type"] != "SCHEDULED" or run["state_name"] == "AwaitingRetry"):
            set_state(api_url, run, "CANCELLING", message)
    until = time.monotonic() + seconds
    while find_flow_runs(api_url, "CANCELLING") and time.monotonic() < until:
        time.sleep(0.5)


def find_flow_runs(api_url: str, *types: str) -> list[FlowRun]:
    """The work pool's flow runs in states of these types, latest start first. Raises httpx.HTTPError."""
    states, pools = {"state": {"type": {"any_": list(types)}}}, {"name": {"any_": [POOL]}}
    url = f"{api_url}/flow_runs/filter"
    query = {"flow_runs": states, "work_pools": pools, "sort": "START_TIME_DESC", "limit": PAGE}
    found: list[FlowRun] = []
    while len(found) % PAGE == 0 and (page := _answer("POST", url, query | {"offset": len(found)})):
        found += page
    return found


def set_state(api_url: str, run: FlowRun, kind: str, message: str, name: str | None = None) -> None:
    """Propose a state for a flow run; the server may refuse it, for example after another transition."""
    state = {"type": kind, "name": name, "message": message}
    _answer("POST", f"{api_url}/flow_runs/{run['id']}/set_state", {"state": state})


def _answer(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """The server's response as JSON. Raises httpx.HTTPError."""
    return ask(method, url, body, TIMEOUT_SECONDS).raise_for_status().json()


def crashes_in_a_row(states: Iterable[dict[str, Any]]) -> tuple[list[str], str]:
    """ISO times, in order, of a flow run's crashes since it last ended in another way; the last other type of state."""
    latest_first = sorted(states, key=lambda state: str(state["timestamp"]), reverse=True)
    since_end = list(takewhile(lambda state: state["type"] not in ENDS, latest_first))
    before = next((state["type"] for state in latest_first if state["type"] != "CRASHED"), "")
    return [state["timestamp"] for state in reversed(since_end) if state["type"] == "CRASHED"], before


def suspended(run: FlowRun) -> bool:
    """Whether a flow run is suspended: paused without a process until it is resumed."""
    return bool(run["state_type"] == "PAUSED" and run["state"]["state_details"].get("pause_reschedule"))


def age(run: FlowRun) -> float:
    """How many seconds ago the flow run entered its state."""
    return time.time() - datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def main() -> None:
    """Run the keeper for the server of PREFECT_API_URL until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    api_url = os.environ["PREFECT_API_URL"]
    log.info("watching the server at %s and its worker", api_url)
    Keeper(api_url, stopped)()


if __name__ == "__main__":
    main()
