"""What a service takes of its machine, measured from outside: with its descendants, and after its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from waiting import wait_until

from areal_tasks.launchers.local import LocalHandle
from areal_tasks.launchers.usage import machine, measure

BURN = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass']); p.wait()"


def test_the_work_of_descendants_counts(tmp_path: object) -> None:
    process = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
    handle = LocalHandle(process, None)  # type: ignore[arg-type]
    try:
        wait_until(lambda: ((handle.usage() or machine()).cpu_seconds or 0) > 1, "CPU time of the child")
        alone, whole = measure(process.pid, descendants=False), handle.usage()
        assert whole is not None and whole.host == socket.gethostname() and whole.gpu is None
        assert alone.cpu_seconds is not None and (whole.cpu_seconds or 0) > 1 > alone.cpu_seconds
        assert whole.memory and alone.memory and whole.memory > alone.memory
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert handle.usage() is None
    assert measure(process.pid).cpu_seconds is None
