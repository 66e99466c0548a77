"""The process that loads the verifier once and forks the workers, so that a new worker takes milliseconds.

It replaces that of `multiprocessing`, which imports the caller's `__main__` (a whole flow) again in every worker, is
shared by the process, and survives when a pool is closed.

Its parent sends commands over a SOCK_SEQPACKET socket: `fork` (with the worker's end of a channel), or a process id to
kill; it reports `ready` or `failed`, `started` and `exited`. When the socket closes, the parent has ended or closed the
pool: all workers and their descendants are killed. If this process dies first, the kernel kills the workers
(PR_SET_PDEATHSIG). While user code is being imported, a watchdog process listens to the socket instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Final

import psutil

from areal_tasks.rewards.load import load_verifier
from areal_tasks.rewards.worker import leave, serve
from schemas.errors import UserError

WATCHDOG_GRACE_SECONDS: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Entry point: `argv[1]` is the socket's descriptor. The first message is the pool's specification."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    os.dup2(2, 1)  # keeps a verifier's prints out of the caller's standard output
    spec = json.loads(control.recv(1 << 20))
    watchdog = _start_watchdog(control)
    try:
        verifier = load_verifier(spec["verifier"], spec["arguments"])
    except UserError as error:
        _send(control, {"event": "failed", "message": str(error)})
        _kill(watchdog)
        return
    gc.collect()
    gc.freeze()  # the workers share these pages until they are written to
    server = _Server(control, verifier, spec["memory_mb"])
    _send(control, {"event": "ready"})
    server.run()
    _kill(watchdog)


class _Server:
    def __init__(self, control: socket.socket, verifier: Any, memory_mb: int) -> None:
        self.control, self.verifier, self.memory_mb = control, verifier, memory_mb
        self.workers: set[int] = set()
        self.wakeup = _child_signals()

    def run(self) -> None:
        """Handles commands until the parent's end of the socket closes, then kills all workers."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            self._reap()
            if self.control.fileno() in ready and not self._handle_command():
                break
        for pid in self.workers:
            _kill_tree(pid)
            os.waitpid(pid, 0)

    def _handle_command(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 64, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        if message == b"fork":
            self._fork(socket.socket(fileno=descriptors[0]))
        elif int(message) in self.workers:
            _kill_tree(int(message))
        return True

    def _fork(self, channel: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_worker(channel, parent)
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)  # the child does the same; the first call takes effect
        channel.close()
        self.workers.add(pid)
        _send(self.control, {"event": "started", "pid": pid})

    def _run_worker(self, channel: socket.socket, parent: int) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            _die_with(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            self.wakeup.close()
            serve(channel, self.verifier, self.memory_mb)
            status = 0
        finally:
            leave(status)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(4096)
        for pid in list(self.workers):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill_group(pid)  # what it left running; before its id can be reused
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self.workers.discard(pid)
                _send(self.control, {"event": "exited", "pid": pid, "status": status})


def _child_signals() -> socket.socket:
    """A socket that becomes readable when a child ends."""
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def _start_watchdog(control: socket.socket) -> int:
    """A process that kills this one soon after the parent has ended, even during an import. It dies with this one."""
    group = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _die_with(group)
    hangup = select.poll()
    hangup.register(control, 0)  # POLLHUP is always reported
    hangup.poll()
    time.sleep(WATCHDOG_GRACE_SECONDS)
    os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; exits now if the parent has ended already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _send(control: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the parent has ended; the next read reports it
        control.send(json.dumps(event).encode())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _kill_tree(pid: int) -> None:
    """Also kills what the worker started in a session of its own, as sandboxes do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
