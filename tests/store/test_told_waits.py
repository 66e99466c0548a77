"""What a run waits for, as another process reads it: never what has ended, and nothing of a process that is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from store_builders import recipe

from areal_tasks.store.backend import Store
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import Run
from areal_tasks.store.waits import current_waits, is_current, waits_record, write_waits
from schemas.manifest import Wait, WaitsRecord

WAIT = Wait(at="trainer", what="/train of version 3", since="2026-01-01T10:00:00+00:00", limit="none", says="3 of 4")


def opened(store: Store) -> Run:
    return open_run(store, "run", recipe())


def test_the_last_record_of_the_last_start_counts(store: Store) -> None:
    run = opened(store)
    assert current_waits(run) is None
    for n, waits in enumerate([(), (WAIT,), (), (WAIT, WAIT)], 1):
        write_waits(run, n, waits_record(waits, 30.0))
        found = current_waits(run)
        assert (found.waits if found else ()) == waits
    write_waits(run, 4, waits_record((), 30.0))  # an answer was lost: what is stored stays
    assert current_waits(run) is not None
    assert audit(store, "run").sound
    again = opened(store)
    assert current_waits(run) is None and current_waits(again) is None


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def test_a_killed_process_waits_for_nothing_at_once(store: Store, process: subprocess.Popen[str]) -> None:
    run = opened(store)
    write_waits(run, 1, waits_record([WAIT], 30.0).model_copy(update={"pid": process.pid}))
    assert current_waits(run) is not None
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert current_waits(run) is None
    process.wait()
    assert current_waits(run) is None


def test_who_does_not_renew_what_was_told_here_is_gone() -> None:
    told = datetime(2026, 1, 1, 10, 0, tzinfo=UTC)
    record = WaitsRecord(host=socket.gethostname(), pid=os.getpid(), told=told.isoformat(), seconds=30.0, waits=(WAIT,))
    assert is_current(record, told - timedelta(hours=1)) and is_current(record, told + timedelta(seconds=30))
    assert not is_current(record, told + timedelta(minutes=5))


@pytest.mark.parametrize("told", ["2000-01-01T10:00:00+00:00", "2100-01-01T10:00:00+00:00"])
def test_clocks_of_two_machines_are_not_compared(store: Store, told: str) -> None:
    run = opened(store)
    write_waits(run, 1, waits_record([WAIT], 30.0).model_copy(update={"host": "another", "told": told}))
    found = current_waits(run)
    assert found is not None and (found.host, found.told) == ("another", told)
    append_log(store, "run", "failed", {"owner": run.owner})
    assert current_waits(run) is None
