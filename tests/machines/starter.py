"""A cluster system of a few lines: `launcher.type: machines.starter:Starters` starts tasks on the machines of a bed.

`python starter.py ADDRESS` runs on each machine and starts what it is sent. `NODES` names the machines; task number n
goes to machine n modulo their number, or to the first that answers after it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from warm_processes import Popen

PORT: Final = 7100
NODES: Final = "AREAL_TEST_NODES"
CONNECT_SECONDS: Final = 3.0


class Running:
    """A task on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.code: int | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def waiting(self) -> str:
        return ""

    def exit_code(self) -> int | None:
        return self.code

    def cancel(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has ended

    def _wait(self) -> None:
        try:
            self.code = int(self.connection.makefile().readline() or 1)
        except OSError:
            self.code = 1


class Starters:
    """Gives each task a machine in turn."""

    def __init__(self, settings: object) -> None:
        self.nodes = os.environ[NODES].split(",")
        self.turns = itertools.count()
        self.tasks: list[Running] = []

    def submit(self, task: object) -> Running:
        order = {"command": task.command, "environment": dict(task.environment)}  # type: ignore[attr-defined]
        first = next(self.turns)
        for node in (self.nodes[(first + k) % len(self.nodes)] for k in range(len(self.nodes))):
            try:
                connection = socket.create_connection((node, PORT), CONNECT_SECONDS)
            except OSError:
                continue
            connection.settimeout(None)
            connection.sendall(json.dumps(order).encode() + b"\n")
            running = Running(connection)
            self.tasks.append(running)
            return running
        raise OSError("no machine answers")

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


def main(address: str) -> None:
    with socket.create_server((address, PORT), backlog=64) as listener:
        print("ready", flush=True)
        while True:
            threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()


def serve(connection: socket.socket) -> None:
    """Run a task. The end of what the other side sends means that it is cancelled; a lost connection means nothing."""
    from warm_processes import Popen  # here: it is no module of the flow that imports this one

    order = json.loads(connection.makefile().readline())
    process = Popen(
        order["command"], env=os.environ | order["environment"], stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=cancel_at_end, args=[connection, process], daemon=True).start()
    code = process.wait()
    try:
        connection.sendall(f"{code}\n".encode())
    except OSError:
        return  # the flow is gone


def cancel_at_end(connection: socket.socket, process: Popen) -> None:
    try:
        ended = connection.recv(1) == b""
    except OSError:
        return
    if ended and process.poll() is None:
        process.terminate()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    main(sys.argv[1])
