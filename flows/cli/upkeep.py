"""What the keeper does for flow runs: finds those whose process is gone, and bounds how often one is run again.

The worker reports a flow process that dies, and an automation runs its flow run again. What neither of them can see is
seen here: a process that died while the worker or the server was down, a crash whose event was lost with the server,
and a flow run that crashes again and again without getting anywhere.
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

#: Seconds after which a flow run without a process is believed to have lost it: a worker that lives reports it sooner.
GONE_SECONDS = {"RUNNING": 10.0, "CANCELLING": 10.0, "PAUSED": 10.0, "PENDING": 45.0}
#: Seconds after which the worker does not end a flow run that was cancelled: it asks, and kills 7 s later.
STUCK_SECONDS = 45.0
#: Seconds that the automation is given to run a crashed flow run again.
MISSED_SECONDS = 10.0
#: Crashes in a row, without anything committed between them, after which a flow run is not run again.
CRASHES = 5
TIMEOUT_SECONDS = 10.0
#: How the message of a state begins by which the automation or the keeper, and no person, runs a flow run again.
AGAIN = "Crashed; run again"
#: The server's own name for a flow run that its deployment's concurrency limit has wait.
WAITS_FOR_SLOT = "AwaitingConcurrencySlot"
CANCELLED_EARLIER = "It crashed while it was being cancelled."


def flow_processes() -> dict[int, str]:
    """The flow run that each process of our flow runs on this machine belongs to, services included, by process id."""
    found = ((process.pid, environment_of(process).get(FLOW_RUN, "")) for process in psutil.process_iter())
    return {pid: flow_run for pid, flow_run in found if flow_run}


def last_look() -> Path:
    """Its modification time: crashes before it have been seen to, by a keeper that may be gone. Removed by `down`."""
    return home() / "last-look"


def seen_to() -> float:
    """Seconds since 1970 up to which crashes have been seen to; now where nothing says."""
    try:
        return last_look().stat().st_mtime
    except FileNotFoundError:
        return time.time()


@dataclass
class Upkeep:
    """One look after another at the flow runs of a server's work pool. Raises httpx.HTTPError while it is away."""

    api_url: str
    began: float = field(default_factory=seen_to)
    seen_without: dict[str, float] = field(default_factory=dict)
    seen_running: set[str] = field(default_factory=set)  # ids of their states

    def __call__(self) -> None:
        """Poll once, and do what is to be done."""
        until = time.time() - MISSED_SECONDS  # later crashes are left to the automation for now
        self._look()
        if until > self.began:
            last_look().touch()
            os.utime(last_look(), (until, until))

    def _look(self) -> None:
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
        """Flow runs whose process has been gone for a while have crashed, or are cancelled if that was asked for."""
        runs = list(runs)
        alive = set(flow_processes().values()) if runs else set()
        lost = {f"{run['id']} {run['state_id']}": run for run in runs if run["id"] not in alive}
        now = time.monotonic()
        self.seen_without = {key: self.seen_without.get(key, now) for key in lost}
        for key, run in lost.items():
            if now - self.seen_without[key] >= GONE_SECONDS[run["state_type"]]:
                cancelled = run["state_type"] == "CANCELLING"
                state = ("CANCELLED", "Cancelled") if cancelled else ("CRASHED", "Crashed")
                set_state(self.api_url, run, *state, "The flow run's process is gone and nobody has reported it.")

    def _end_unwanted(self, running: dict[str, dict[str, Any]]) -> None:
        """Cancel what was run again although somebody had cancelled it, where no look came before it was running."""
        for state_id in running.keys() - self.seen_running:
            run = running[state_id]
            if crashed_while_cancelling(self._states(run)):
                set_state(self.api_url, run, "CANCELLING", "Cancelling", CANCELLED_EARLIER)
        self.seen_running = set(running)

    def _run_again(self, crashed: Iterable[dict[str, Any]]) -> None:
        """Crashes that no keeper has seen to, and the automation has not answered: its event died with the server."""
        for run in crashed:
            if timestamp(run) > self.began and not self._cancel_if_asked(run, self._states(run)):
                set_state(
                    self.api_url,
                    run,
                    "SCHEDULED",
                    "AwaitingRetry",
                    f"{AGAIN} by the keeper of `arealflow up`",
                )

    def _recovers(self) -> bool:
        automation = find(self.api_url, RECOVERY)
        return automation is not None and bool(automation["enabled"])

    def _bound(self, run: dict[str, Any]) -> None:
        """Fail a flow run that has crashed CRASHES times in a row and committed nothing meanwhile."""
        states = self._states(run)
        if self._cancel_if_asked(run, states):
            return
        times = crashes_in_a_row(states)
        if len(times) >= CRASHES and not self._committed_since(run["id"], times[-CRASHES]):
            why = f"Crashed {CRASHES} times in a row and committed nothing meanwhile; not run again by itself."
            set_state(
                self.api_url, run, "FAILED", "Failed", f"{why} Its log says why. Mend that, then retry the flow run."
            )

    def _states(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = _answer(
            "GET", f"{self.api_url}/flow_run_states/", params={"flow_run_id": run["id"]}
        )
        return states

    def _cancel_if_asked(self, run: dict[str, Any], states: Iterable[dict[str, Any]]) -> bool:
        """Cancel a flow run that crashed while it was being cancelled, instead of having it run again."""
        asked = crashed_while_cancelling(states)
        if asked:
            set_state(self.api_url, run, "CANCELLED", "Cancelled", CANCELLED_EARLIER)
        return asked

    def _committed_since(self, flow_run: str, moment: str) -> bool:
        states = {"name": {"any_": ["Committed"]}}
        query = {
            "flow_runs": {"id": {"any_": [flow_run]}},
            "task_runs": {"state": states, "end_time": {"after_": moment}},
        }
        return bool(_answer("POST", f"{self.api_url}/task_runs/count", query))


def end_cancelling(api_url: str, why: str, after_seconds: float = 0.0) -> None:
    """Finish what no worker does: kill flows that have been cancelling for so long, and say that they are cancelled.

    Ended in an orderly way, they would say that they crashed, and be run again.

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
    """Cancel every flow run of the pool that has a process or is about to; returns when they are, or after `seconds`.

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
    """The work pool's flow runs in states of these types, the latest first. Raises httpx.HTTPError."""
    query = {
        "flow_runs": {"state": {"type": {"any_": list(types)}}},
        "work_pools": {"name": {"any_": [POOL]}},
        "sort": "START_TIME_DESC",
    }
    runs: list[dict[str, Any]] = _answer("POST", f"{api_url}/flow_runs/filter", query)
    return runs


def set_state(api_url: str, run: dict[str, Any], kind: str, name: str, message: str) -> None:
    """Propose a state for a flow run; the server may refuse it, as where another came first."""
    state = {"type": kind, "name": name, "message": message}
    _answer("POST", f"{api_url}/flow_runs/{run['id']}/set_state", {"state": state})


def _answer(method: str, url: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None) -> Any:
    """The server's answer. Raises httpx.HTTPError."""
    return ask(method, url, body, params, TIMEOUT_SECONDS).raise_for_status().json()


def crashes_in_a_row(states: Iterable[dict[str, Any]]) -> list[str]:
    """When the flow run crashed, since it last ended in another way; ISO times, the last one last."""
    times: list[str] = []
    for state in sorted(states, key=lambda state: str(state["timestamp"])):
        if state["type"] == "CRASHED":
            times.append(state["timestamp"])
        elif state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "PAUSED"):
            times.clear()
    return times


def crashed_while_cancelling(states: Iterable[dict[str, Any]]) -> bool:
    """Whether the last crash came while the flow run was being cancelled, and nobody has ended or retried it since."""
    ordered = sorted(states, key=lambda state: str(state["timestamp"]))
    last = max((i for i, state in enumerate(ordered) if state["type"] == "CRASHED"), default=0)
    return last > 0 and ordered[last - 1]["type"] == "CANCELLING" and not any(map(_by_a_person, ordered[last:]))


def _by_a_person(state: dict[str, Any]) -> bool:
    """Whether somebody has decided upon the flow run: it came to an end, or was told to run again by hand."""
    told = state["type"] == "SCHEDULED" and state["name"] != WAITS_FOR_SLOT
    retried = told and not (state["message"] or "").startswith(AGAIN)
    return retried or state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "CANCELLING")


def suspended(run: dict[str, Any]) -> bool:
    """Whether a flow run is paused without a process, as one that waits to be resumed is."""
    return bool(run["state_type"] == "PAUSED" and run["state"]["state_details"].get("pause_reschedule"))


def timestamp(run: dict[str, Any]) -> float:
    """When the flow run came into its state, in seconds since 1970."""
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def seconds_in_state(run: dict[str, Any]) -> float:
    """How long the flow run has been in its state."""
    return datetime.now(UTC).timestamp() - timestamp(run)
