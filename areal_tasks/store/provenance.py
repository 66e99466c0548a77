"""Provenance of records: code, host, owner, times, Prefect runs. Never part of a key or a content digest."""

from __future__ import annotations

import socket
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.manifest import Provenance


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def utc(text: str) -> datetime:
    """A record's time as the views have it: in UTC, without a time zone."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)


def make_provenance(
    owner: int, started: str, *, prefect_flow_run_id: str = "", prefect_task_run_id: str = ""
) -> Provenance:
    """Provenance of a record that is committed now; `started` is the value of `now()` when its work began."""
    return Provenance(
        code_version=code_version(),
        host=socket.gethostname(),
        owner=owner,
        started=started,
        committed=now(),
        prefect_flow_run_id=prefect_flow_run_id,
        prefect_task_run_id=prefect_task_run_id,
    )


@cache
def code_version() -> str:
    """`git describe` of the checkout this code runs from, else the version of the installed package."""
    try:
        return _git_version(Path(__file__).resolve().parents[2]) or version("arealflow")
    except PackageNotFoundError:
        return "unknown"


def _git_version(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a checkout on a disk that hangs
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
