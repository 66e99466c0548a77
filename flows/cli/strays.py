"""Finds processes that `arealflow up` or its keeper started but, killed just then, did not list in up.json."""

from __future__ import annotations

import contextlib
from typing import Final

import psutil

from flows.home import home

#: Environment variable of each server, worker and keeper that says which it is. Their child processes inherit it.
PART: Final = "AREALFLOW_PART"
FLOW_RUN: Final = "PREFECT__FLOW_RUN_ID"


def parts() -> dict[int, str]:
    """`server`, `worker` or `keeper`, by process id: all running ones of this home, listed in up.json or not."""
    marked = {process.pid: (_part(process), _parent(process)) for process in psutil.process_iter()}
    return {pid: part for pid, (part, parent) in marked.items() if part and marked.get(parent, ("", 0))[0] != part}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment of a running process of this home; empty for any other, and where access is denied."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            values = process.environ()
            return values if values.get("AREALFLOW_HOME") == str(home()) else {}
    return {}


def _part(process: psutil.Process) -> str:
    """The part that a process is or belongs to; empty for flow processes."""
    values = environment_of(process)
    return "" if FLOW_RUN in values else values.get(PART, "")


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0
