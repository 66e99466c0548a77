"""Processes of this machine: whether one runs, and the ends of parents and descendants (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Final

import psutil

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
NO_PROXY: Final = ("no_proxy", "NO_PROXY")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
POLL_SECONDS: Final = 0.05
END_SECONDS: Final = 20.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def keep_loopback_direct() -> None:
    """From here on, no client of this process and of those that it starts reaches this machine through a proxy.

    Adds loopback to `no_proxy`, whose other entries stay. Clients read one of two spellings.
    """
    given = ",".join(os.environ.get(name, "") for name in NO_PROXY)
    entries = dict.fromkeys(filter(None, map(str.strip, [*given.split(","), *LOOPBACK])))
    os.environ |= dict.fromkeys(NO_PROXY, "*" if "*" in entries else ",".join(entries))


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this id, has not ended; another one of a process's id does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def family(pid: int) -> list[psutil.Process]:
    """The process with this id, then its descendants; none if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def adopt_orphans() -> None:
    """From here on, descendants whose parent has died become children of this process instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`'s main thread ends; end at once if it has already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_descendants() -> None:
    """Kill every descendant of this process, repeatedly until none is left, or for END_SECONDS.

    Also those that have left its session, or lost their parent after `adopt_orphans`.
    """
    deadline = time.monotonic() + END_SECONDS
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)
        _reap()


def _reap() -> None:
    """Collect children that have ended, adopted ones included: until then they count as descendants."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
