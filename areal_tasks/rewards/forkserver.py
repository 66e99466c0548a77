"""The process that loads the verifier once and forks the workers, so that a new worker takes milliseconds.

The forkserver of `multiprocessing` does not fit: it imports the caller's `__main__` (a whole flow) again in every
worker, there is one per process, and it survives when a pool is closed.

Its parent sends it the pool's specification over a SOCK_SEQPACKET socket, and then one end of a channel for each worker
that it wants. When the socket closes, the parent has ended or closed the pool: all workers and their descendants are
killed. When a channel closes, its worker is. If this process dies first, the kernel kills the workers
(PR_SET_PDEATHSIG). While user code is being imported, a watchdog process listens to the socket instead.

What the parent reads from a channel is JSON, one per line: the worker's process id (or why the verifier cannot be
loaded), its results, and its exit status. The worker reads rows, verifies them one by one, and answers each at once. A
worker that ran out of memory, or in which a verifier left a thread or a process running, marks its result as the last
and waits to be killed, so that later samples are not affected.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from areal_tasks.processes import adopt_orphans, die_with_parent, family
from areal_tasks.rewards.load import load_verifier
from areal_tasks.rewards.protocol import Result, Row, Verdict, as_verdict
from schemas.errors import UserError

#: Characters of `parsed` and `detail` that are kept.
MAX_TEXT: Final = 500
WATCHDOG_GRACE_SECONDS: Final = 1.0


def serve(channel: socket.socket, verifier: Callable[[Row], object], memory_mb: int) -> None:
    """Answers chunks of rows until the other end closes, or waits to be killed after a last result."""
    limit_memory(memory_mb)
    sys.stdout = sys.stderr  # unbuffered: nothing is lost when the process is killed
    for line in channel.makefile("rb"):
        for row in json.loads(line):
            result = judge(verifier, Row(*row))
            channel.sendall(json.dumps(result).encode() + b"\n")
            if result.last:
                while True:  # until it is killed with all that it has started, which its end would make orphans
                    signal.pause()


def judge(verifier: Callable[[Row], object], row: Row) -> Result:
    """One row's result; any exception of the verifier, even SystemExit, is an `error`."""
    started = time.perf_counter()
    last = False
    try:
        verdict = as_verdict(_returned(verifier, row))
    except MemoryError:
        verdict, last = Verdict(0.0, "error", detail="the verifier needed more memory than reward.memory_mb"), True
    except BaseException as error:
        verdict = Verdict(0.0, "error", detail=_describe(error))
    seconds = time.perf_counter() - started
    texts = _text(verdict.parsed), _text(verdict.detail)
    return Result(verdict.reward, verdict.verdict, *texts, seconds, _cpu_seconds(), last or _left_running())


def _returned(verifier: Callable[[Row], object], row: Row) -> object:
    """What the verifier returns. A process that it has forked, and that returns as well, ends: it has no answer."""
    own = os.getpid()
    try:
        return verifier(row)
    finally:
        if os.getpid() != own:
            exit_process(_status(sys.exception()))


def _status(error: BaseException | None) -> int:
    """The exit status of a process that ends with this exception, which is printed as Python does."""
    if error is None:
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return (error.code or 0) & 0xFF
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _left_running() -> bool:
    """Whether there is another thread, or a child process that was not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return threading.active_count() > 1
    return True


def limit_memory(memory_mb: int) -> None:
    """Lets the address space grow by `memory_mb` MiB from here on, and forbids core dumps."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now + memory_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _describe(error: BaseException) -> str:
    """The exception and the line of the verifier that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})" if trace else ""
    try:
        return f"{type(error).__name__}: {error}{where}"
    except Exception:  # an exception whose own __str__ raises
        return f"{type(error).__name__}{where}"


def _text(text: object) -> str:
    """A short string that is valid UTF-8."""
    return str(text)[:MAX_TEXT].encode("utf-8", "replace").decode()


def exit_process(status: int) -> None:
    """Ends a forked process without running its parent's exit handlers."""
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Entry point: `argv[1]` is the socket's descriptor. The first message is the pool's specification."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    os.dup2(2, 1)  # keeps a verifier's prints out of the caller's standard output
    name, arguments, memory_mb, code = json.loads(control.recv(1 << 20))
    watchdog = _start_watchdog(control)
    verifier, mistake = None, ""
    try:
        verifier = load_verifier(name, arguments, code)
    except UserError as error:
        mistake = str(error)
    gc.collect()
    gc.freeze()  # the workers share these pages until they are written to
    server = _Server(control, verifier, mistake, memory_mb)
    while server.serve():
        pass
    server.close()
    os.kill(watchdog, signal.SIGKILL)
    os.waitpid(watchdog, 0)


class _Server:
    def __init__(self, control: socket.socket, verifier: Any, mistake: str, memory_mb: int) -> None:
        self.control, self.verifier, self.mistake, self.memory_mb = control, verifier, mistake, memory_mb
        self.workers: dict[int, socket.socket | None] = {}  # their ends of their channels; None: it has been killed
        self.wakeup, writable = socket.socketpair()  # becomes readable when a child ends
        self.wakeup.setblocking(False)
        writable.setblocking(False)
        signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> bool:
        """Wait for the parent or a worker's end, and react. False once the parent's end of the socket has closed."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wakeup, select.POLLIN)
        for end in filter(None, self.workers.values()):
            waiting.register(end, 0)  # POLLHUP is always reported
        ready = {descriptor for descriptor, _ in waiting.poll()}
        for pid, channel in self.workers.items():
            if channel is not None and channel.fileno() in ready:
                _kill_tree(pid)
                channel.close()
                self.workers[pid] = None
        self._reap()
        return self.control.fileno() not in ready or self._fork()

    def close(self) -> None:
        """Kill all workers."""
        for pid in self.workers:
            _kill_tree(pid)
            os.waitpid(pid, 0)

    def _fork(self) -> bool:
        """Fork the worker that the parent asks for. False if it has closed the socket."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 64, 1)
        except ConnectionError:
            message = b""
        if not message:
            return False
        channel, parent = socket.socket(fileno=descriptors[0]), os.getpid()
        if self.mistake:
            _tell(channel, self.mistake)
            channel.close()
            return True
        pid = os.fork()
        if pid == 0:
            self._run_worker(channel, parent)
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)  # the child does the same; the first call takes effect
        self.workers[pid] = channel
        _tell(channel, pid)
        return True

    def _run_worker(self, channel: socket.socket, parent: int) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            adopt_orphans()  # a daemon that a verifier leaves is its child again
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in filter(None, (self.control, self.wakeup, *self.workers.values())):
                other.close()
            serve(channel, self.verifier, self.memory_mb)
            status = 0
        finally:
            exit_process(status)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(4096)
        for pid, channel in list(self.workers.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill_group(pid)  # what it left running; before its id can be reused
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                del self.workers[pid]
                if channel is not None:
                    _tell(channel, status)
                    channel.close()


def _start_watchdog(control: socket.socket) -> int:
    """A process that kills this one soon after the parent has ended, even during an import. It dies with this one."""
    group = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(group)
    hangup = select.poll()
    hangup.register(control, 0)  # POLLHUP is always reported
    hangup.poll()
    time.sleep(WATCHDOG_GRACE_SECONDS)
    os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _tell(end: socket.socket, what: str | int) -> None:
    """Send a line. A line break precedes it, since a worker may have been killed while it wrote one."""
    with contextlib.suppress(ConnectionError, BlockingIOError):  # the other end has closed, or is full
        end.send(b"\n" + json.dumps(what).encode() + b"\n", socket.MSG_DONTWAIT)


def _kill_tree(pid: int) -> None:
    """Also kills what the worker started in a session of its own, as sandboxes do."""
    for child in family(pid)[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
