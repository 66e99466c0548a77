"""The process that has imported torch and forks others on request (see `warm_processes`).

`warm_server.py SOCKET DESCRIPTOR` is the server, which writes to the descriptor when it listens; `warm_server.py
FILE.call` calls the function that is pickled in the file, in a process that the server has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pickle
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, cast

import session_folder
from warm_processes import MESSAGE, ROOT, install, send

PRELOAD: Final = (
    "areal_tasks.stages.loop",
    "areal_tasks.engines.trainer.process",
    "areal_tasks.engines.embedded.process",
    "areal_tasks.launchers.node",
)
#: The folders of installed packages, independent of a process's working directory and PYTHONPATH.
INSTALLED: Final = [path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests"))]


class Server:
    """Forks processes on request, and reports their exit status. Has one thread: others do not survive a fork."""

    def __init__(self, listener: socket.socket, alive: int, wakeup: socket.socket) -> None:
        self.listener, self.alive, self.wakeup = listener, alive, wakeup
        self.asking: dict[int, socket.socket] = {}  # by descriptor
        self.forked: dict[int, socket.socket] = {}  # by process id

    def run(self) -> None:
        """Handle requests until no pytest process is left."""
        while True:
            waiting = select.poll()
            for descriptor in (self.listener.fileno(), self.wakeup.fileno(), *self.asking):
                waiting.register(descriptor, select.POLLIN)
            waiting.register(self.alive, 0)  # POLLHUP is always reported
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if self.alive in ready:
                return
            self._reap()
            if self.listener.fileno() in ready:
                channel, _ = self.listener.accept()
                self.asking[channel.fileno()] = channel
            for descriptor in ready & self.asking.keys():
                self._answer(self.asking.pop(descriptor))

    def end(self) -> None:
        """Kill the forked processes that still run, with their process groups, and remove the shared folder."""
        for pid in self.forked:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
        for pid in self.forked:
            os.waitpid(pid, 0)
        shutil.rmtree(session_folder.folder(), ignore_errors=True)

    def _answer(self, channel: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 64)
        if not message:  # the requesting process has ended
            channel.close()
            return
        if (pid := os.fork()) == 0:
            _run_requested(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.forked[pid] = channel
        send(channel, {"pid": pid})

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(4096)
        for pid in list(self.forked):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self.forked.pop(pid) as channel, contextlib.suppress(ConnectionError):
                    send(channel, {"status": os.waitstatus_to_exitcode(status)})


def _run_requested(order: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn this forked process into the requested one, run it, and exit."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run that a shell began with `&` ignores it
        if order["session"]:
            os.setsid()
        _move_descriptors(descriptors, order["descriptors"])
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        os.chdir(order["cwd"])
        _set_environment(order["args"], order["env"])
        random.seed()
        sys.modules["numpy"].random.seed()
        _run(order["args"])
        status = 0
    except SystemExit as ended:
        status = _status(ended)
    except BaseException:
        traceback.print_exc()
    _exit(status)


def _move_descriptors(given: Sequence[int], numbers: Sequence[int]) -> None:
    """Move the descriptors `given` to these numbers, and close all others."""
    above = max(*numbers, 256) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in given]
    os.closerange(0, above)
    for descriptor, number in zip(kept, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(above, os.sysconf("SC_OPEN_MAX"))


def _set_environment(args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set the environment, and write it and the command line over the server's, so that /proc shows them."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is found in the new environment
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(cast(BinaryIO, io.FileIO(1, "w", closefd=False)), write_through=True)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    *_, arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    _write(arguments, arguments_end, args)
    _write(variables, variables_end, [f"{name}={value}" for name, value in environment.items()])


def _write(start: int, end: int, texts: Sequence[str]) -> None:
    data = b"".join(text.encode() + b"\0" for text in texts)
    assert len(data) < end - start, "more than the server has room for"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))


def _run(args: Sequence[str]) -> None:
    """Run `python [-P] -m MODULE …` or `python [-P] FILE …` as the interpreter does."""
    safe = args[1] == "-P"
    run = args[1 + safe :]
    module = run[1] if run[0] == "-m" else ""
    sys.argv = list(run[1:] if module else run)
    first = os.getcwd() if module else os.path.dirname(os.path.abspath(run[0]))
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if safe else [first]), *given, *INSTALLED]
    importlib.invalidate_caches()
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(run[0], run_name="__main__")


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _exit(status: int) -> NoReturn:
    """Exit as the interpreter does, but without destructors, which would close objects of the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _child_signals() -> socket.socket:
    """A socket that becomes readable when a child ends."""
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def serve(path: Path, ready: int) -> None:
    """Run the server at the socket `path`; it writes to the descriptor `ready` once it listens."""
    for module in PRELOAD:
        importlib.import_module(module)
    install()  # for what the forked processes start
    gc.collect()
    gc.freeze()  # forked processes share these pages until one writes to them
    alive = os.open(session_folder.folder() / session_folder.ALIVE, os.O_RDONLY | os.O_NONBLOCK)
    wakeup = _child_signals()
    path.unlink(missing_ok=True)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        with os.fdopen(ready, "wb") as answer:
            answer.write(b"ready")
        server = Server(listener, alive, wakeup)
        server.run()
        server.end()


def main() -> None:
    if sys.argv[1].endswith(".call"):
        function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
        function(*arguments)
    else:
        serve(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
