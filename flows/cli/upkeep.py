"""What the keeper does for flow runs: finds those whose process is gone, and bounds how often one is retried.

The worker reports a flow process that dies, and an automation retries its flow run. This module handles what neither
notices: a process that died while the worker or the server was down, a crash whose event was lost with the server, and
a flow run that crashes repeatedly without progress.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from flows.cli.automations import RECOVERY, ask, find
from flows.cli.machine import POOL
from flows.cli.strays import FLOW_RUN, environment_of
from flows.home import home

#: Seconds after which a flow run without a process is declared lost: a living worker reports it sooner.
GONE_SECONDS = {"RUNNING": 10.0, "CANCELLING": 10.0, "PAUSED": 10.0, "PENDING": 45.0}
#: Seconds after which the worker will not end a cancelled flow run any more: it kills 7 s after asking it to end.
STUCK_SECONDS = 45.0
#: Seconds within which the automation should have retried a crashed flow run.
MISSED_SECONDS = 10.0
#: Consecutive crashes, without a committed stage in between, after which a flow run is not retried.
CRASHES = 5
TIMEOUT_SECONDS = 10.0
#: Start of the state message with which the automation or the keeper, rather than a user, retries a flow run.
AGAIN = "Crashed; run again"
#: Prefect's state name of a flow run that waits because of its deployment's concurrency limit.
WAITS_FOR_SLOT = "AwaitingConcurrencySlot"
CANCELLED_EARLIER = "It crashed while it was being cancelled."


def flow_processes() -> dict[int, str]:
    """The flow run of each process of our flow runs on this machine, services included, by process id."""
    found = ((process.pid, environment_of(process).get(FLOW_RUN, "")) for process in psutil.process_iter())
    return {pid: flow_run for pid, flow_run in found if flow_run}


def last_look() -> Path:
    """A file whose modification time says up to when crashes were handled, by this keeper or an earlier one."""
    return home() / "last-look"


def handled_until() -> float:
    """Time, in seconds since 1970, up to which crashes have been handled; now without a record of it."""
    try:
        return last_look().stat().st_mtime
    except FileNotFoundError:
        return time.time()


@dataclass
class Upkeep:
    """Polls the flow runs of a server's work pool. Raises httpx.HTTPError while the server is down."""

    api_url: str
    began: float = field(default_factory=handled_until)
    seen_without: dict[str, float] = field(default_factory=dict)
    seen_running: set[str] = field(default_factory=set)  # ids of their states

    def __call__(self) -> None:
        """Poll once and handle what is found."""
        until = time.time() - MISSED_SECONDS  # later crashes are left to the automation for now
        self._poll()
        if until > self.began:
            last_look().touch()
            os.utime(last_look(), (until, until))

    def _poll(self) -> None:
        active = flow_runs(self.api_url, "RUNNING", "CANCELLING", "PENDING", "PAUSED", "SCHEDULED", "CRASHED")
        self._end_lost([run for run in active if run["state_type"] in GONE_SECONDS and not suspended(run)])
        crashed = [run for run in active if run["state_type"] == "CRASHED" and seconds_in_state(run) > MISSED_SECONDS]
        if crashed and self._recovers():
            self._run_again(crashed)
        for run in active:
            if run["state_type"] == "PENDING" or run["state_name"] == "AwaitingRetry":
                self._bound(run)
        if any(run["state_type"] == "CANCELLING" and seconds_in_state(run) > STUCK_SECONDS for run in active):
            end_cancelling(self.api_url, "Its worker has not ended it.", STUCK_SECONDS)
        self._end_unwanted({run["state_id"]: run for run in active if run["state_type"] == "RUNNING"})

    def _end_lost(self, runs: Iterable[dict[str, Any]]) -> None:
        """Set flow runs without a process for GONE_SECONDS to crashed, or to cancelled if they were being cancelled."""
        runs = list(runs)
        alive = set(flow_processes().values()) if runs else set()
        lost = {f"{run['id']} {run['state_id']}": run for run in runs if run["id"] not in alive}
        now = time.monotonic()
        self.seen_without = {key: self.seen_without.get(key, now) for key in lost}
        for key, run in lost.items():
            if now - self.seen_without[key] >= GONE_SECONDS[run["state_type"]]:
                cancelled = run["state_type"] == "CANCELLING"
                state = ("CANCELLED", "Cancelled") if cancelled else ("CRASHED", "Crashed")
                set_state(self.api_url, run, *state, "The flow run's process is gone and no worker has reported it.")

    def _end_unwanted(self, running: dict[str, dict[str, Any]]) -> None:
        """Cancel flow runs that were retried although cancelled, and ran before a poll could prevent it."""
        for state_id in running.keys() - self.seen_running:
            run = running[state_id]
            if crashed_while_cancelling(self._states(run)):
                set_state(self.api_url, run, "CANCELLING", "Cancelling", CANCELLED_EARLIER)
        self.seen_running = set(running)

    def _run_again(self, crashed: Iterable[dict[str, Any]]) -> None:
        """Schedule crashed flow runs that no keeper has handled and the automation has not retried (event lost)."""
        for run in crashed:
            if timestamp(run) > self.began and not self._cancel_if_asked(run, self._states(run)):
                message = f"{AGAIN} by the keeper of `arealflow up`"
                set_state(self.api_url, run, "SCHEDULED", "AwaitingRetry", message)

    def _recovers(self) -> bool:
        automation = find(self.api_url, RECOVERY)
        return automation is not None and bool(automation["enabled"])

    def _bound(self, run: dict[str, Any]) -> None:
        """Fail a flow run that crashed CRASHES times in a row without committing a stage in between."""
        states = self._states(run)
        if self._cancel_if_asked(run, states):
            return
        times = crashes_in_a_row(states)
        if len(times) >= CRASHES and not self._committed_since(run["id"], times[-CRASHES]):
            why = f"Crashed {CRASHES} times in a row and committed nothing meanwhile; not retried automatically."
            remedy = "Fix the cause that its log names, then retry the flow run."
            set_state(self.api_url, run, "FAILED", "Failed", f"{why} {remedy}")

    def _states(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = _answer(
            "GET", f"{self.api_url}/flow_run_states/", params={"flow_run_id": run["id"]}
        )
        return states

    def _cancel_if_asked(self, run: dict[str, Any], states: Iterable[dict[str, Any]]) -> bool:
        """Cancel a flow run that crashed while it was being cancelled, so that it is not retried; whether it did."""
        cancelled = crashed_while_cancelling(states)
        if cancelled:
            set_state(self.api_url, run, "CANCELLED", "Cancelled", CANCELLED_EARLIER)
        return cancelled

    def _committed_since(self, flow_run: str, moment: str) -> bool:
        states = {"name": {"any_": ["Committed"]}}
        query = {
            "flow_runs": {"id": {"any_": [flow_run]}},
            "task_runs": {"state": states, "end_time": {"after_": moment}},
        }
        return bool(_answer("POST", f"{self.api_url}/task_runs/count", query))


def end_cancelling(api_url: str, why: str, after_seconds: float = 0.0) -> None:
    """Kill flows that have been cancelling for `after_seconds` without their worker ending them; set them to cancelled.

    Ended by SIGTERM, they would report a crash and be retried.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    runs = {run["id"]: run for run in flow_runs(api_url, "CANCELLING") if seconds_in_state(run) >= after_seconds}
    for pid in [pid for pid, run in flow_processes().items() if run in runs] if runs else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    for run in runs.values():
        set_state(api_url, run, "CANCELLED", "Cancelled", why)


def stop_flow_runs(api_url: str, message: str, seconds: float) -> None:
    """Cancel all flow runs of the pool that have a process or soon will; wait until they end, at most `seconds`.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    for run in flow_runs(api_url, "RUNNING", "PENDING", "PAUSED", "SCHEDULED"):
        if not suspended(run) and (run["state_type"] != "SCHEDULED" or run["state_name"] == "AwaitingRetry"):
            set_state(api_url, run, "CANCELLING", "Cancelling", message)
    end = time.monotonic() + seconds
    while flow_runs(api_url, "CANCELLING") and time.monotonic() < end:
        time.sleep(0.5)


def flow_runs(api_url: str, *types: str) -> list[dict[str, Any]]:
    """The work pool's flow runs in states of these types, latest start first. Raises httpx.HTTPError."""
    query = {
        "flow_runs": {"state": {"type": {"any_": list(types)}}},
        "work_pools": {"name": {"any_": [POOL]}},
        "sort": "START_TIME_DESC",
    }
    runs: list[dict[str, Any]] = _answer("POST", f"{api_url}/flow_runs/filter", query)
    return runs


def set_state(api_url: str, run: dict[str, Any], kind: str, name: str, message: str) -> None:
    """Propose a state for a flow run; the server may refuse it, for example after another transition."""
    state = {"type": kind, "name": name, "message": message}
    _answer("POST", f"{api_url}/flow_runs/{run['id']}/set_state", {"state": state})


def _answer(method: str, url: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None) -> Any:
    """The server's response as JSON. Raises httpx.HTTPError."""
    return ask(method, url, body, params, TIMEOUT_SECONDS).raise_for_status().json()


def crashes_in_a_row(states: Iterable[dict[str, Any]]) -> list[str]:
    """ISO times, in order, of the flow run's crashes since it last ended in another way."""
    times: list[str] = []
    for state in sorted(states, key=lambda state: str(state["timestamp"])):
        if state["type"] == "CRASHED":
            times.append(state["timestamp"])
        elif state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "PAUSED"):
            times.clear()
    return times


def crashed_while_cancelling(states: Iterable[dict[str, Any]]) -> bool:
    """Whether the flow run last crashed while being cancelled, and has not ended or been retried by a user since."""
    ordered = sorted(states, key=lambda state: str(state["timestamp"]))
    last = max((i for i, state in enumerate(ordered) if state["type"] == "CRASHED"), default=0)
    return last > 0 and ordered[last - 1]["type"] == "CANCELLING" and not any(map(_settles, ordered[last:]))


def _settles(state: dict[str, Any]) -> bool:
    """Whether this state ends the flow run, cancels it, or is a user's retry."""
    scheduled = state["type"] == "SCHEDULED" and state["name"] != WAITS_FOR_SLOT
    retried = scheduled and not (state["message"] or "").startswith(AGAIN)
    return retried or state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "CANCELLING")


def suspended(run: dict[str, Any]) -> bool:
    """Whether a flow run is suspended: paused without a process until it is resumed."""
    return bool(run["state_type"] == "PAUSED" and run["state"]["state_details"].get("pause_reschedule"))


def timestamp(run: dict[str, Any]) -> float:
    """When the flow run entered its state, in seconds since 1970."""
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def seconds_in_state(run: dict[str, Any]) -> float:
    """How long the flow run has been in its state."""
    return datetime.now(UTC).timestamp() - timestamp(run)
