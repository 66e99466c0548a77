"""A service watches its lifeline before it imports anything that takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from waiting import LIMIT

from areal_tasks.engines.lifeline import LIFELINE

_PROGRAM = """
import runpy, sys
from areal_tasks.engines import lifeline

def watched():
    print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
    raise SystemExit

lifeline.watch_lifeline = watched
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["areal_tasks.engines.trainer", "areal_tasks.engines.embedded"])
def test_the_lifeline_is_watched_before_torch_or_any_other_package_is_imported(module: str) -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM, module], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    bare = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True)
    at_start = {name.partition(".")[0] for name in bare.stdout.split()}  # what site-packages bring to any program
    assert set(found.stdout.split()) - at_start == {"areal_tasks"}


def test_a_service_without_a_pipe_in_place_of_its_lifeline_ends() -> None:
    program = (
        "from areal_tasks.engines.lifeline import watch_lifeline; watch_lifeline(); import threading; "
        "threading.Event().wait()"
    )
    environment = {**os.environ, LIFELINE: "77"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, start_new_session=True, timeout=LIMIT)
    assert ended.returncode == -signal.SIGKILL
