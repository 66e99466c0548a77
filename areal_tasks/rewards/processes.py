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

from areal_tasks.processes import alive, family
from areal_tasks.rewards.protocol import Result, Row
from areal_tasks.secret import without_secrets
from schemas.errors import UserError

#: Limit for importing a verifier's module.
LOAD_SECONDS: Final = 120.0
_REPLY_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.5
_CHECK_SECONDS: Final = 0.05  # least time between two checks of a worker
_COMMAND: Final = "from areal_tasks.rewards.forkserver import main; main()"


class Forkserver:
    """The process of `areal_tasks.rewards.forkserver`, which imports the pool's verifier. `close` it at the end."""

    def __init__(self, verifier: str, arguments: Mapping[str, Any], memory_mb: int, code: str = "") -> None:
        self.verifier = verifier
        self.loaded = False  # whether it has imported the verifier
        self.mistake = ""  # why it cannot import the verifier, once it has said so
        self.reply_seconds = _REPLY_SECONDS
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C in the terminal must reach the caller only
                env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._control.settimeout(_REPLY_SECONDS)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `fork` says so
            self._control.send(json.dumps([verifier, dict(arguments), memory_mb, code]).encode())

    def fork(self) -> socket.socket:
        """Ask for a worker, and return the channel to it. ConnectionError if the process has ended, or hangs."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise self.lost() from error
        return ours

    def ended(self) -> bool:
        return self._process.poll() is not None

    def lost(self) -> Exception:
        """Why the process does not answer: UserError if it does not get the verifier imported, else ConnectionError."""
        if self.mistake:  # another worker was sent it, and its thread has ended the process
            return UserError(self.mistake)
        try:
            status = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            if not self.loaded:
                return UserError(f"reward.verifier: importing {self.verifier} takes longer than {LOAD_SECONDS:g} s.")
            who = f"the process that starts verifiers ({self._process.pid})"
            return ConnectionError(f"{who} has not answered for {self.reply_seconds:g} s: it is ended")
        if not self.loaded:
            return UserError(f"reward.verifier: importing {self.verifier} ends the importing process.")
        return ConnectionError(f"the process that starts verifiers ended with status {status}")

    def close(self) -> None:
        """End the workers and the process, and wait for the latter. May be called again, and by any thread."""
        _hang_up(self._control)
        try:
            self._process.wait(_STOP_SECONDS if self.loaded else 0.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Worker:
    """A verifier process that `server` forks. `close` it at the end, and after its last result.

    UserError if the verifier cannot be loaded; ConnectionError if the forkserver is lost.
    """

    def __init__(self, server: Forkserver) -> None:
        self.server, self._channel = server, server.fork()
        self._lines: deque[bytes] = deque()
        self._rest = b""  # of what has arrived: the beginning of a line
        self._cpu = 0.0  # CPU seconds that the process had used when it began the row in progress
        try:
            self._pid = json.loads(self._reply())
            if isinstance(self._pid, str):
                server.mistake = self._pid
                raise UserError(self._pid)
        except BaseException:
            self.close()
            raise
        server.loaded = True

    def idles(self) -> bool:
        """Whether it waits for rows. It has ended if there is anything to be read."""
        with contextlib.suppress(ConnectionError):
            return self._line(0.0) is None
        return False

    def verify(self, rows: Sequence[Row], cpu_limit: float, wall_limit: float) -> Iterator[Result]:
        """The rows' results, in order; no more after the `last` one of the process: `close` it then.

        ConnectionError if the forkserver is lost, and the process with it.
        """
        self._channel.settimeout(_REPLY_SECONDS)
        try:
            self._channel.sendall(json.dumps(rows).encode() + b"\n")
        except TimeoutError:
            yield _failure("error", "the verifier's process hangs: it does not read the row")
            return
        except OSError:
            pass  # it has ended: its status follows
        for _ in rows:
            result = self._result(cpu_limit, wall_limit)
            yield result
            if result.last:
                return

    def close(self) -> None:
        """Have the process and its descendants killed, if it still runs."""
        _hang_up(self._channel)

    def _result(self, cpu_limit: float, wall_limit: float) -> Result:
        began, left_cpu, left_wall = time.monotonic(), cpu_limit, wall_limit
        too_much = f"more than reward.timeout_seconds = {cpu_limit:g} s of CPU"
        while left_cpu >= 0 and left_wall >= 0:
            # Checks are rare while much time is left: each reads all processes. Threads may use up CPU seconds faster.
            line = self._line(max(_CHECK_SECONDS, min(left_cpu / 4, left_wall)))
            if line is None and not alive(self._pid):
                line = self._reply()
            seconds = time.monotonic() - began
            if line is not None:
                before, result = self._cpu, _parsed(line, seconds)
                self._cpu = max(before, result.cpu)
                in_time = result.cpu - before <= cpu_limit
                return result if in_time else _failure("timeout", too_much, seconds, result.last)
            left_cpu, left_wall = cpu_limit - (_cpu_seconds(self._pid) - self._cpu), wall_limit - seconds
        if left_cpu < 0:
            return _failure("timeout", too_much, seconds)
        return _failure("error", f"wall clock: not finished within {wall_limit:g} s (reward.wall_seconds)", seconds)

    def _reply(self) -> bytes:
        """What the forkserver sends soon, unless it has ended or hangs."""
        end = time.monotonic() + (self.server.reply_seconds if self.server.loaded else LOAD_SECONDS)
        while (line := self._line(_POLL_SECONDS)) is None:
            if self.server.ended() or time.monotonic() > end:  # what it has started may hold the channel
                raise self.server.lost()
        return line

    def _line(self, seconds: float) -> bytes | None:
        """The next line; None if there is none within `seconds`. ConnectionError if the forkserver has ended."""
        deadline = time.monotonic() + seconds
        while not self._lines:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.0))
            try:
                arrived = self._channel.recv(1 << 20)
            except (TimeoutError, BlockingIOError):
                return None
            except ConnectionResetError:
                arrived = b""
            if not arrived:
                raise self.server.lost()
            *lines, self._rest = (self._rest + arrived).split(b"\n")
            self._lines.extend(filter(None, lines))
        return self._lines.popleft()


def _hang_up(end: socket.socket) -> None:
    """Close a socket, also where a process that the caller has forked holds it."""
    with contextlib.suppress(OSError):  # closed before, by either side
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _parsed(line: bytes, seconds: float) -> Result:
    """The result in this line, or what an exit status means for the row in progress."""
    try:
        found = json.loads(line)
        if not isinstance(found, int):
            return Result(*found)
    except (ValueError, TypeError):
        return _failure("error", "the verifier's process answered with something that is no result", seconds)
    if found >= 0:
        return _failure("error", f"the verifier ended its process with status {found}", seconds)
    return _failure("error", f"the verifier's process was killed by signal {-found}", seconds)


def _failure(verdict: str, detail: str, seconds: float = 0.0, last: bool = True) -> Result:
    return Result(0.0, verdict, "", detail, seconds, 0.0, last)


def _cpu_seconds(pid: int) -> float:
    """The CPU seconds of a process and of those that it has started."""
    total = 0.0
    for member in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(member.cpu_times()[:4])  # user, system, and both of children that have ended
    return total
