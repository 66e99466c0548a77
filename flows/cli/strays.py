"""Finds what `arealflow up` or its keeper has started and, killed just then, has not written down."""

from __future__ import annotations

import contextlib
from typing import Final

import psutil

from flows.home import home

#: In the environment of each server, worker and keeper: which of them it is. What they start inherits it.
PART: Final = "AREALFLOW_PART"
FLOW_RUN: Final = "PREFECT__FLOW_RUN_ID"


def parts() -> dict[int, str]:
    """`server`, `worker` or `keeper`, by process id: all of this home that run, whether written down or not."""
    marked = {process.pid: (_part(process), _parent(process)) for process in psutil.process_iter()}
    return {pid: part for pid, (part, parent) in marked.items() if part and marked.get(parent, ("", 0))[0] != part}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment of a process of this home that still runs; empty for others', and where we may not look."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            values = process.environ()
            return values if values.get("AREALFLOW_HOME") == str(home()) else {}
    return {}


def _part(process: psutil.Process) -> str:
    """Which part a process is or belongs to; empty for flow processes."""
    values = environment_of(process)
    return "" if FLOW_RUN in values else values.get(PART, "")


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0
