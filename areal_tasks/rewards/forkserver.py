"""The process that loads the verifier once and forks the workers: a fresh worker costs milliseconds, not imports.

Our own rather than `multiprocessing`'s: that one imports the caller's `__main__` again in every worker (a whole
flow), is shared by the process, and stays behind when a pool is closed.

It obeys its parent over a SOCK_SEQPACKET socket: `fork` (with the worker's end of a channel), or a process id to
kill; it reports `ready` or `failed`, `started` and `exited`. When the socket closes, the parent is gone or has closed
the pool: every worker and what it started is killed. Should this process die first, the kernel kills the workers
(PR_SET_PDEATHSIG). While user code is being imported nobody listens to the socket, so a watchdog process does.
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
    os.dup2(2, 1)  # a verifier's prints shall not land in the caller's own output
    spec = json.loads(control.recv(1 << 20))
    watchdog = _start_watchdog(control)
    try:
        verifier = load_verifier(spec["verifier"], spec["arguments"])
    except UserError as error:
        _send(control, {"event": "failed", "message": str(error)})
        _kill(watchdog)
        return
    gc.collect()
    gc.freeze()  # the workers share these pages as long as nobody writes to them
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
        """Obeys until the parent's end of the socket closes, then kills all workers."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            self._reap()
            if self.control.fileno() in ready and not self._obey():
                break
        for pid in self.workers:
            _kill_tree(pid)
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
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
            self._be_worker(channel, parent)
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)  # as the child does: whoever comes first
        channel.close()
        self.workers.add(pid)
        _send(self.control, {"event": "started", "pid": pid})

    def _be_worker(self, channel: socket.socket, parent: int) -> None:
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
                _kill_group(pid)  # what it started and left behind; before its id is free again
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
    """A process that kills this one soon after the parent is gone, whatever this one is busy with. It dies with it."""
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
    """Has the kernel kill this process when its parent ends; ends it now when that has happened already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _send(control: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the parent is gone; the next read says so
        control.send(json.dumps(event).encode())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _kill_tree(pid: int) -> None:
    """Also what the worker has started in a session of its own, as sandboxes do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
