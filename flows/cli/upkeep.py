"""What the keeper does for flow runs: finds those whose process is gone, and bounds how often one is run again.

The worker reports a flow process that dies, and an automation runs its flow run again. What neither of them can see is
seen here: a process that died while the worker or the server was down, a crash whose event was lost with the server,
and a flow run that crashes again and again without getting anywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import psutil

from flows.cli.automations import RECOVERY, find
from flows.cli.machine import POOL
from flows.home import home

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
#: Seconds after which a flow run without a process is believed to have lost it: a worker that lives reports it sooner.
GONE_SECONDS = {"RUNNING": 10.0, "CANCELLING": 10.0, "PAUSED": 10.0, "PENDING": 45.0}
#: Seconds that the automation is given to run a crashed flow run again.
MISSED_SECONDS = 10.0
#: Crashes in a row, without anything committed between them, after which a flow run is not run again.
CRASHES = 5
TIMEOUT_SECONDS = 10.0


def flow_processes() -> dict[int, str]:
    """The flow run that each process of our flow runs on this machine belongs to, services included, by process id."""
    found = ((process.pid, _flow_run_of(process)) for process in psutil.process_iter())
    return {pid: flow_run for pid, flow_run in found if flow_run}


def _flow_run_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            values = process.environ()
            return values.get(FLOW_RUN, "") if values.get("AREALFLOW_HOME") == str(home()) else ""
    return ""


@dataclass
class Upkeep:
    """One look after another at the flow runs of a server's work pool. Raises httpx.HTTPError while it is away."""

    api_url: str
    began: float = field(default_factory=time.time)
    seen_without: dict[str, float] = field(default_factory=dict)

    def __call__(self) -> None:
        """Look once, and do what is to be done."""
        active = self._flow_runs("RUNNING", "CANCELLING", "PENDING", "PAUSED", "SCHEDULED", "CRASHED")
        self._end_lost([run for run in active if run["state_type"] in GONE_SECONDS and not suspended(run)])
        crashed = [run for run in active if run["state_type"] == "CRASHED" and seconds_in_state(run) > MISSED_SECONDS]
        if crashed and self._recovers():
            self._run_again(crashed)
        for run in active:
            if run["state_type"] in ("SCHEDULED", "PENDING") and run["run_count"]:
                self._bound(run)

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
                self._set_state(run, *state, "The flow run's process is gone and nobody has reported it.")

    def _run_again(self, crashed: Iterable[dict[str, Any]]) -> None:
        """Crashes since this keeper began that the automation has not answered: its event died with the server."""
        for run in crashed:
            if timestamp(run) > self.began:
                self._set_state(run, "SCHEDULED", "AwaitingRetry", "Crashed; run again by the keeper of `arealflow up`")

    def _recovers(self) -> bool:
        automation = find(self.api_url, RECOVERY)
        return automation is not None and bool(automation["enabled"])

    def _bound(self, run: dict[str, Any]) -> None:
        """Fail a flow run that has crashed CRASHES times in a row and committed nothing meanwhile."""
        states = self._ask("GET", "/flow_run_states/", params={"flow_run_id": run["id"]})
        times = crashes_in_a_row(states)
        if len(times) >= CRASHES and not self._committed_since(run["id"], times[-CRASHES]):
            why = f"Crashed {CRASHES} times in a row and committed nothing meanwhile; not run again by itself."
            self._set_state(run, "FAILED", "Failed", f"{why} Its log says why. Mend that, then retry the flow run.")

    def _committed_since(self, flow_run: str, moment: str) -> bool:
        states = {"name": {"any_": ["Committed"]}}
        query = {
            "flow_runs": {"id": {"any_": [flow_run]}},
            "task_runs": {"state": states, "end_time": {"after_": moment}},
        }
        return bool(self._ask("POST", "/task_runs/count", json=query))

    def _flow_runs(self, *types: str) -> list[dict[str, Any]]:
        query = {
            "flow_runs": {"state": {"type": {"any_": list(types)}}},
            "work_pools": {"name": {"any_": [POOL]}},
            "sort": "START_TIME_DESC",
        }
        runs: list[dict[str, Any]] = self._ask("POST", "/flow_runs/filter", json=query)
        return runs

    def _set_state(self, run: dict[str, Any], kind: str, name: str, message: str) -> None:
        state = {"type": kind, "name": name, "message": message}
        self._ask("POST", f"/flow_runs/{run['id']}/set_state", json={"state": state})

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        answer = httpx.request(method, f"{self.api_url}{path}", timeout=TIMEOUT_SECONDS, **arguments)
        return answer.raise_for_status().json()


def crashes_in_a_row(states: Iterable[dict[str, Any]]) -> list[str]:
    """When the flow run crashed, since it last ended in another way; ISO times, the last one last."""
    times: list[str] = []
    for state in sorted(states, key=lambda state: str(state["timestamp"])):
        if state["type"] == "CRASHED":
            times.append(state["timestamp"])
        elif state["type"] in ("COMPLETED", "FAILED", "CANCELLED", "PAUSED"):
            times.clear()
    return times


def suspended(run: dict[str, Any]) -> bool:
    """Whether a flow run is paused without a process, as one that waits to be resumed is."""
    return bool(run["state_type"] == "PAUSED" and run["state"]["state_details"].get("pause_reschedule"))


def timestamp(run: dict[str, Any]) -> float:
    """When the flow run came into its state, in seconds since 1970."""
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def seconds_in_state(run: dict[str, Any]) -> float:
    """How long the flow run has been in its state."""
    return datetime.now(UTC).timestamp() - timestamp(run)
