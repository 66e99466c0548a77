"""Processes end although a disk does not answer: what they do last does not wait for it, nor do those tied to them.

A thread that waits for a disk cannot be ended, and keeps what its process has open; a stopped `os._exit` stands for it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from waiting import LIMIT

PROGRAM = """
import logging, os, sys, threading, time
from areal_tasks.store import in_flight
hang = threading.Event()

class Hanging(logging.Handler):
    def emit(self, record):
        hang.wait()

    def flush(self):
        hang.wait()

in_flight.LAST_SECONDS = 0.1
logging.getLogger().addHandler(Hanging())
if "kept" in sys.argv:
    os._exit = lambda status: hang.wait()
ledger = in_flight.Ledger()
with ledger.entry("write", "the disk"):
    ledger.end_if_hangs(0.0, 75)
"""
SERVICE = """
import os, shutil, sys, threading
from areal_tasks.engines import lifeline
lifeline.DUTY_SECONDS = lifeline.REMOVE_SECONDS = 0.1
hang = threading.Event().wait
os.environ[lifeline.SCRATCH] = "/nowhere"
if "folder" in sys.argv:
    shutil.rmtree = lambda *given, **more: hang()
lifeline.watch_lifeline(hang if "duties" in sys.argv else lambda: None)
hang()
"""


def test_a_process_whose_log_is_on_the_disk_ends() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=LIMIT).returncode == 75


def test_what_is_tied_to_a_process_that_cannot_end_hears_of_its_end() -> None:
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "kept"], pass_fds=[write])
    os.close(write)
    try:
        assert select.select([read], [], [], LIMIT)[0] and os.read(read, 1) == b"", "its services' lifeline"
        assert process.poll() is None
    finally:
        os.close(read)
        process.kill()
        process.wait()


@pytest.mark.parametrize("hangs", ["nothing", "folder", "duties"])
def test_a_service_ends_with_its_flow_whatever_it_does_last(hangs: str) -> None:
    read, write = os.pipe()
    environment = os.environ | {"AREAL_LIFELINE_FD": str(read)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, hangs], env=environment, pass_fds=[read], start_new_session=True
    )
    os.close(read)
    os.close(write)
    assert process.wait(LIMIT) == -signal.SIGKILL
