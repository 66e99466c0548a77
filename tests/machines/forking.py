"""Processes on a machine of a bed are forked from one that has imported torch, as others are (`warm_processes`).

`serve_on` starts the server of a machine: a process that the test run's own server forks, and that enters the machine's
namespaces. A program that has `PLACE` in its environment uses it, and so do the services that it starts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import session_folder
import warm_processes

if TYPE_CHECKING:
    from machines.bed import Machine

FOLDER: Final = Path("/tmp/forking")  # on the machine
READY: Final = FOLDER / "ready"
PLACE: Final = {session_folder.FOLDER: str(FOLDER)}
#: The mounts come last: until then, /proc is the one in which the machine has its number.
NAMESPACES: Final = ("ipc", "uts", "net", "pid", "mnt")


def serve_on(machine: Machine) -> None:
    """Start the machine's server. It ends with the machine."""
    from waiting import wait_until  # here: the programs on the machine do not wait by it

    server = warm_processes.Popen([sys.executable, __file__, str(machine.pid)], env=machine.environment)

    def ready() -> bool:
        assert server.poll() is None, "the machine's server has ended"
        return machine.path(READY).exists() and bool(machine.path(READY).read_bytes())

    wait_until(ready, "the machine's server")


def serve(machine: int) -> None:
    """Serve on the machine whose first process this is."""
    import warm_server  # here: it imports nothing that this process does not have

    enter(machine)
    if child := os.fork():  # only children are among the machine's processes
        os.waitpid(child, 0)
        return
    os.environ.update(PLACE)
    os.chdir(os.environ["HOME"])
    FOLDER.mkdir()
    os.mkfifo(FOLDER / session_folder.ALIVE)
    os.open(FOLDER / session_folder.ALIVE, os.O_RDWR)  # never closed: the server lives as long as the machine
    warm_server.serve(FOLDER / "warm", os.open(READY, os.O_WRONLY | os.O_CREAT))


def enter(process: int) -> None:
    """Enter the namespaces of a process. OSError if that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    for descriptor in opened:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
