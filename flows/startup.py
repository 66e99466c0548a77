"""Reports how long each step of a start took until the first committed iteration: a log line and a log record.

The process calls `mark` after each of its own steps; the rest is read from manifests and the services' records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from prefect import get_run_logger

from areal_tasks.stages.jobs import IterationResult
from areal_tasks.store.backend import StoreError
from areal_tasks.store.commit import find_record
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.paths import service
from areal_tasks.store.runs import Run
from schemas.manifest import ServiceRecord, StageManifest

READY: Final = " ready"
SHOWN_SECONDS: Final = 0.05

#: Steps of this process and when each ended, in seconds since the epoch. The first entry is the process's start.
_marks: list[tuple[str, float]] = []
_flows: list[float] = []  # when each flow of this process began


def mark(what: str) -> None:
    """Record that step `what`, begun at the previous mark, ends now."""
    _marks.append((what, time.time()))


def start_timing(nested: bool) -> None:
    """A flow begins, `nested` in another or not. The first is timed from the process's start, later ones from now."""
    if _flows and not nested:
        _marks.clear()
    _flows.append(time.time())
    mark("Prefect")


class Startup:
    """One start of a run, timed from its flow's begin; from now, if the flow has started a run before."""

    def __init__(self) -> None:
        mark("checks")
        self.began, self.before = _marks[0][1], step_seconds(_marks)
        self.reported = False
        _marks.clear()

    def __call__(self, run: Run, result: IterationResult, services: Sequence[str], flow_run_id: str = "") -> None:
        """Report the first committed iteration in the flow's log and the run's; later ones are ignored."""
        if self.reported:
            return
        self.reported = True
        made = [built.manifest for built in result.built.values() if not built.reused]
        found = {"seconds": time.time() - self.began} | self.before | stage_seconds(made)
        records = [find_record(run.store, service(run.name, run.owner, name, 0), ServiceRecord) for name in services]
        found |= {one.name + READY: epoch(one.started) - self.began for one in records if one is not None}
        details = {name: round(seconds, 3) for name, seconds in found.items()}
        get_run_logger().info("%s", describe(details))
        try:
            append_log(run.store, run.name, "first iteration", details, prefect_flow_run_id=flow_run_id)
        except StoreError as error:  # a missing log record must not fail the run
            get_run_logger().warning("the run's log could not be written: %s", error)


def step_seconds(marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Seconds per step after the first mark; steps of equal name are summed."""
    found: dict[str, float] = {}
    for (_, before), (what, until) in pairwise(marks):
        found[what] = found.get(what, 0.0) + until - before
    return found


def stage_seconds(manifests: Sequence[StageManifest]) -> dict[str, float]:
    """Seconds of each stage, in order of commit; stages may overlap."""
    spans = [(epoch(m.provenance.started), epoch(m.provenance.committed), m.stage) for m in manifests]
    return {stage: until - since for since, until, stage in sorted(spans, key=lambda span: span[1])}


def describe(times: Mapping[str, float]) -> str:
    """`first iteration after 23.4 s: imports 5.1, initialise 0.9, rollout 14.0; trainer ready after 9.2 s`."""
    spent = [f"{name} {s:.1f}" for name, s in times.items() if not name.endswith(READY) and s >= SHOWN_SECONDS]
    ready = [f"{name} after {s:.1f} s" for name, s in times.items() if name.endswith(READY)]
    what = "; ".join(", ".join(part) for part in (spent[1:], ready) if part)
    return f"first iteration after {times['seconds']:.1f} s: {what}"


def epoch(text: str) -> float:
    """An ISO time in seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def process_began() -> float:
    """When this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # psutil is up to a second off
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


_marks.append(("", process_began()))
