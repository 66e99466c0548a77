"""A forked process looks, from within and from without, like one that was started afresh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_processes
from waiting import wait_until

PROBE = """
import json, os, sys
found = {"argv": sys.argv, "path": sys.path[:2], "cwd": os.getcwd(), "env": dict(os.environ), "name": __name__}
found |= {"session": os.getsid(0) == os.getpid(), "open": sorted(map(int, os.listdir("/proc/self/fd")))}
print(json.dumps(found), file=sys.stderr, flush=True)
sys.stdin.read()
"""
ENDS = {
    "pass": 0,
    "raise SystemExit": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('a reason')": 1,
    "1 / 0": 1,
    "import os; os._exit(7)": 7,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "import threading; threading.Thread(target=lambda: print('the last thread')).start()": 0,
}


def start(kind: Any, program: str, folder: Path, **options: Any) -> Any:
    (folder / "program.py").write_text(program)
    command = [sys.executable, str(folder / "program.py"), "an argument"]
    return kind(command, cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True, **options)


def observed(kind: Any, folder: Path) -> dict[str, Any]:
    """What a process says of itself, and what others see of it."""
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "A": "b=c", "PYTHONPATH": "/nowhere"}
    read, write = os.pipe()
    with (folder / "said").open("wb") as said:
        process = start(kind, PROBE, folder, env=environment, stdin=read, stderr=said)
    os.close(read)
    try:
        wait_until(lambda: (folder / "said").read_text().endswith("\n"))
        seen = psutil.Process(process.pid)
        outside = {"cmdline": [word for word in seen.cmdline() if word], "environ": seen.environ()}
    finally:
        os.close(write)
    assert process.wait() == 0
    return json.loads((folder / "said").read_text()) | outside


def test_it_is_what_a_fresh_process_is(tmp_path: Path) -> None:
    assert observed(warm_processes.Popen, tmp_path) == observed(subprocess.Popen, tmp_path)


@pytest.mark.parametrize("program", ENDS)
def test_it_ends_as_a_fresh_process_does(tmp_path: Path, program: str) -> None:
    process = start(warm_processes.Popen, program, tmp_path, stderr=subprocess.DEVNULL)
    assert process.wait() == process.poll() == process.returncode == ENDS[program]


def test_it_can_be_killed_and_waited_for(tmp_path: Path) -> None:
    process = start(warm_processes.Popen, "import signal; signal.pause()", tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # harmless


def note(path: Path, text: str) -> None:
    path.write_text(f"{text} {'torch' in sys.modules}")


def test_a_function_is_called_where_torch_is_there_already(tmp_path: Path) -> None:
    process = warm_processes.Process(note, tmp_path / "noted", "said")
    process.join()
    assert process.exitcode == 0 and (tmp_path / "noted").read_text() == "said True"
