"""Python processes forked from one that has imported torch: seconds of CPU less than starting each of them afresh.

`Popen` stands in for `subprocess.Popen([sys.executable, "-m", MODULE, …])` and `[sys.executable, FILE, …]`. What it
starts has the arguments, environment, folder, descriptors, session, exit status and entries in /proc of a process
that was started afresh; only its parent is another. `install()` has the local launcher start services in this way, as
that of each forked process does.

`FORKED MODULE …` is a command like `python -m MODULE …`, for those who start programs themselves: its process waits for
the forked one, passes signals on to it, and ends as it does.

One server forks for a whole test run, for xdist's workers and for the processes below them. The first to need it
starts it. It ends, with all that it has forked, when no pytest process of the run is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import IO, Any, Final, Self

import session_folder

ROOT: Final = Path(__file__).resolve().parents[1]
SERVER: Final = Path(__file__).with_name("warm_server.py")
FORKED: Final = (sys.executable, str(Path(__file__).resolve()))
#: Modules of services that the local launcher forks.
SERVICES: Final = (
    *("areal_tasks.engines.trainer", "areal_tasks.engines.embedded", "areal_tasks.engines.sglang"),
    *("areal_tasks.rollout.worker", "failing_trainer", "saving_trainer", "small_service"),
)
MESSAGE: Final = 1 << 18  # bytes at most
INHERITED: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", session_folder.FOLDER)
#: Bytes of the server's own command line and environment, which forked processes overwrite with theirs.
ARGUMENTS_ROOM: Final = 1 << 10
ENVIRONMENT_ROOM: Final = 1 << 16


class Popen:
    """A process that the server forks, with the part of `subprocess.Popen` that the launcher and the tests use."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        text: bool = False,
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self.stdout: IO[Any] | None = None
        order = {
            "args": self.args,
            "cwd": os.path.abspath(cwd or os.curdir),
            "env": dict(os.environ if env is None else env),
            "descriptors": [0, 1, 2, *pass_fds],
            "session": start_new_session,
        }
        self._lock = threading.Lock()
        self._channel = _connected()
        with contextlib.ExitStack() as opened:
            output = self._pipe(opened, text) if stdout == subprocess.PIPE else _descriptor(opened, stdout, 1)
            errors = output if stderr == subprocess.STDOUT else _descriptor(opened, stderr, 2)
            send(self._channel, order, _descriptor(opened, stdin, 0), output, errors, *pass_fds)
        self.pid: int = _receive(self._channel)["pid"]

    def _pipe(self, opened: contextlib.ExitStack, text: bool) -> int:
        ours, theirs = os.pipe()
        opened.callback(os.close, theirs)
        self.stdout = os.fdopen(ours, "r" if text else "rb")
        return theirs

    def poll(self) -> int | None:
        """The exit status; none while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._channel], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = _receive(self._channel)["status"]
                self._channel.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def _descriptor(opened: contextlib.ExitStack, given: int | IO[Any] | None, own: int) -> int:
    if given is None:
        return own
    if given == subprocess.DEVNULL:
        return opened.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
    return given if isinstance(given, int) else given.fileno()


class Process(Popen):
    """A call of `function` in a process that has the modules, folder and environment of this one.

    Function and arguments are pickled. What the call prints, it prints here.
    """

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        call = session_folder.folder() / f"{uuid.uuid4().hex}.call"
        call.write_bytes(pickle.dumps((function, arguments)))
        path = os.pathsep.join(path for path in sys.path if path)
        super().__init__([sys.executable, str(SERVER), str(call)], env={**os.environ, "PYTHONPATH": path})

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the call."""
        self.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        """0 where the call returned; none while it lasts."""
        return self.poll()


def output_of(*args: str) -> str:
    """The output of `python ARGS` in the project's folder. AssertionError with its stderr if it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        process = Popen([sys.executable, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        with process:
            text: str = process.stdout.read()
        errors.seek(0)
        assert process.returncode == 0, errors.read()
    return text


def install() -> None:
    """Have the local launcher of this process fork the services that import torch."""
    from areal_tasks.launchers import local

    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _start_service})  # type: ignore[assignment]


def _start_service(args: Sequence[str], **options: Any) -> Popen | subprocess.Popen[bytes]:
    warm = args[0] == sys.executable and args[1] == "-m" and args[2] in SERVICES
    return Popen(args, **options) if warm else subprocess.Popen(args, **options)


def _connected() -> socket.socket:
    """A channel to the server of this test run, which is started if it does not run."""
    path = session_folder.folder() / "warm"
    with session_folder.locked("warm"):
        with contextlib.suppress(OSError):
            return _connect(path)
        _start_server(path)
        return _connect(path)


def _connect(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(str(path))
    except OSError:
        channel.close()
        raise
    return channel


def _start_server(path: Path) -> None:
    """Start the server, and wait until it listens at `path`. It does not inherit the mark of `stage_driver`."""
    ready, theirs = os.pipe()
    path_of_modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"AREAL_TEST_ROOM": " " * ENVIRONMENT_ROOM, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of_modules}
    with path.with_suffix(".log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, str(SERVER), str(path), str(theirs), " " * ARGUMENTS_ROOM],
            env={**{name: os.environ[name] for name in INHERITED if name in os.environ}, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            start_new_session=True,
        )
    os.close(theirs)
    with open(ready, "rb") as answer:
        assert answer.read() == b"ready", path.with_suffix(".log").read_text()


def send(channel: socket.socket, message: Mapping[str, Any], *descriptors: int) -> None:
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def _receive(channel: socket.socket) -> Any:
    """The next message. If the server has ended, so have the processes it forked: they count as killed."""
    with contextlib.suppress(ConnectionError):
        if message := channel.recv(MESSAGE):
            return json.loads(message)
    return {"pid": 0, "status": -signal.SIGKILL}


def _run_forked(module: str, *arguments: str) -> int:
    """The exit status of the module in a forked process, which gets the signals that this one does."""
    process = Popen([sys.executable, "-m", module, *arguments])

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return process.wait()


if __name__ == "__main__":
    if (ended := _run_forked(*sys.argv[1:])) < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
