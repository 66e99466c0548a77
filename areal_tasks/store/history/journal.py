"""The append-only log of a run: users and times of starts, ends, changes, forks, replays and removals.

Each line has the digest of the line before it: `arealflow audit` finds a line that was altered or removed.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, Store
from areal_tasks.store.commit import (
    append_record,
    bytes_digest,
    checked_last_number,
    last_number,
    new_attempt,
    read_record,
)
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import now
from schemas.manifest import ACTIONS, BEGINNINGS, ENDINGS, LogRecord

#: How the first line of a start names the digest of users' code: this, and the recipe field that names it.
CODE: Final = "code of "
Details = Mapping[str, bool | int | float | str]


def append_log(
    store: Store, run: str, action: str, details: Details | None = None, *, prefect_flow_run_id: str = ""
) -> LogRecord:
    """Add a line to the log of `run`; returns it. Several processes may do so concurrently.

    Raises:
        ValueError: `action` is none of `schemas.manifest.ACTIONS`.
        StoreError: the store refuses.
    """
    if action not in ACTIONS:
        raise ValueError(f"unknown action {action!r}: a log records {', '.join(ACTIONS)}")

    def line(n: int) -> LogRecord:
        """The line if its number is `n`: it has the digest of the line before."""
        return LogRecord(
            n=n,
            attempt=new_attempt(),
            action=action,
            user=current_user(),
            host=socket.gethostname(),
            time=now(),
            pid=os.getpid(),
            prefect_flow_run_id=prefect_flow_run_id,
            details=dict(details or {}),
            previous=log_digest(store, run, n - 1),
        )

    return append_record(store, partial(paths.log, run), log_length(store, run) + 1, line)


def read_log(store: Store, run: str, after: int = 0) -> list[LogRecord]:
    """The log of `run` after its first `after` lines, oldest first; empty for a run of schema 1, which had none."""
    numbers = range(after + 1, checked_last_number(store, partial(paths.log, run)) + 1)
    return parallel(lambda n: read_record(store, paths.log(run, n), LogRecord), numbers)


def end_of_start(store: Store, run: str, owner: int) -> LogRecord | None:
    """The line about the end of the start `owner` of the flow; None if it runs, was killed, or never existed.

    It reads the log backwards, as far as this start's first line.
    """
    for n in range(log_length(store, run), 0, -1):
        line = read_record(store, paths.log(run, n), LogRecord)
        if line.details.get("owner") == owner:
            if line.action in ENDINGS:
                return line
            if line.action in BEGINNINGS:
                return None
    return None


def code_of_last_start(store: Store, run: str) -> dict[str, str]:
    """By recipe field, the digests of the users' code that the last start of the flow has logged; reads backwards."""
    for n in range(log_length(store, run), 0, -1):
        line = read_record(store, paths.log(run, n), LogRecord)
        if line.action in BEGINNINGS:
            return {name.removeprefix(CODE): str(v) for name, v in line.details.items() if name.startswith(CODE)}
    return {}


def log_length(store: Store, run: str, known: int = 0) -> int:
    """How many lines the log has, at least `known`; O(log n) requests beyond these and no listing."""
    return last_number(store, partial(paths.log, run), known + 1)


class LogHead(NamedTuple):
    """The number of lines of a log, and the SHA-256 of the bytes of the last one (empty: none)."""

    lines: int = 0
    digest: str = ""


def log_head(store: Store, run: str, known: LogHead = LogHead()) -> LogHead:
    """The head of the log of `run`; one request if that is still `known`."""
    lines = log_length(store, run, known.lines)
    return known if lines == known.lines else LogHead(lines, log_digest(store, run, lines))


def log_digest(store: Store, run: str, n: int) -> str:
    """SHA-256 of the bytes of the n-th line; empty for none."""
    try:
        return bytes_digest(store, paths.log(run, n)) if n > 0 else ""
    except Missing:  # the line was removed: the next audit reports it, and the log continues
        return ""


def current_user() -> str:
    """The user who runs this process: name, or number if there is no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())
