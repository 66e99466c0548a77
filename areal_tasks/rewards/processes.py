"""The pool's handles for its processes: the forkserver, and the workers that it forks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import psutil

from areal_tasks.rewards.protocol import Result, Row
from schemas.errors import UserError

#: Limit for importing a verifier's module.
LOAD_SECONDS: Final = 120.0
_REPLY_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 2.0
_COMMAND: Final = "from areal_tasks.rewards.forkserver import main; main()"


class Worker:
    """A verifier process, and the rows sent to it, in the order of its answers."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self.rows: deque[int] = deque()
        self.began = 0.0  # time at which it began the first of them, on the monotonic clock
        self.cpu = 0.0  # CPU seconds that the process had used by then
        self.check_at = 0.0  # time of the next check of its limits
        self.ended = False
        self._buffer = b""

    def begin(self, cpu: float) -> None:
        """The process begins its next row, having used `cpu` seconds of CPU so far."""
        self.began, self.cpu = time.monotonic(), cpu

    def used(self) -> float:
        """CPU seconds that the row has taken so far, in this process and in those it has started."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(member.cpu_times()[:4])  # user, system, and both of children that have ended
        return total - self.cpu

    def send(self, rows: Sequence[Row]) -> None:
        """Sends a chunk. TimeoutError if the process does not read it, another OSError if it has ended."""
        self.channel.settimeout(_REPLY_SECONDS)
        self.channel.sendall(json.dumps(rows).encode() + b"\n")

    def receive(self) -> Iterator[Result]:
        """The results that have arrived, without waiting. ValueError for anything else."""
        self.channel.settimeout(0)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            arrived = self.channel.recv(1 << 20)
            self.ended = not arrived
            self._buffer += arrived
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if not self.rows:
                raise ValueError("the verifier's process gave more results than it had rows")
            yield _result(line)


class Forkserver:
    """The process of `areal_tasks.rewards.forkserver`. Call `load` first and `close` at the end, even if that fails."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C in the terminal must reach the caller only
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.reply_seconds = _REPLY_SECONDS
        self.exited: list[tuple[int, int]] = []  # received, and not yet returned by `exits`

    def fork(self) -> Worker:
        """Starts and returns a new worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(b"fork", theirs.fileno())
        while (event := self._reply())["event"] != "started":
            self.exited.append((event["pid"], event["status"]))
        return Worker(event["pid"], ours)

    def _reply(self) -> Any:
        """The next event. ConnectionError if the process hangs; `close` then kills it."""
        try:
            return self._event(self.reply_seconds)
        except TimeoutError as error:
            raise ConnectionError(
                f"the process that starts verifiers ({self._process.pid}) has not answered for "
                f"{self.reply_seconds:g} s: it is ended"
            ) from error

    def kill(self, worker: Worker) -> None:
        """Kills the worker and its descendants, if it still runs."""
        worker.channel.close()
        self._send(str(worker.pid).encode())

    def exits(self) -> list[tuple[int, int]]:
        """Process ids and exit statuses (negative: a signal) of the workers that ended since the last call."""
        with contextlib.suppress(BlockingIOError):
            while True:
                event = self._event(timeout=0)
                self.exited.append((event["pid"], event["status"]))
        found, self.exited = self.exited, []
        return found

    def close(self) -> None:
        """Ends the workers and the process, and waits for the latter."""
        self.control.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def abandon(self) -> None:
        """From another thread: kill the process while it loads, so that `load` fails at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # a process that the import started may hold the other end

    def load(self, verifier: str, arguments: Mapping[str, Any], memory_mb: int) -> None:
        """Have the process import the verifier. UserError if that fails."""
        spec = {"verifier": verifier, "arguments": dict(arguments), "memory_mb": memory_mb}
        self._send(json.dumps(spec).encode())
        try:
            event = self._event(LOAD_SECONDS)
        except TimeoutError as error:
            raise UserError(f"reward.verifier: importing {verifier} takes longer than {LOAD_SECONDS:g} s.") from error
        except ConnectionError as error:
            raise UserError(f"reward.verifier: importing {verifier} ends the importing process.") from error
        if event["event"] == "failed":
            raise UserError(event["message"])

    def _send(self, message: bytes, *descriptors: int) -> None:
        self.control.settimeout(_REPLY_SECONDS)
        try:
            socket.send_fds(self.control, [message], descriptors)
        except BrokenPipeError as error:
            raise ConnectionError(self._gone()) from error

    def _event(self, timeout: float) -> Any:
        self.control.settimeout(timeout)
        message = self.control.recv(1 << 16)
        if not message:
            raise ConnectionError(self._gone())
        return json.loads(message)

    def _gone(self) -> str:
        return f"the process that starts verifiers ended with status {self._process.wait()}"


def _result(line: bytes) -> Result:
    try:
        return Result(*json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError("the verifier's process answered with something that is no result") from error
