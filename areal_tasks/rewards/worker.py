"""The loop of a verifier process: reads rows, verifies them one by one, and answers each at once.

Rows and results are JSON, one per line. A process that ran out of memory, or in which a verifier left a thread or a
process running, marks its result as the last and ends, so that later samples are not affected.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from areal_tasks.rewards.protocol import Row, Verdict, as_verdict

#: Characters of `parsed` and `detail` that are kept.
MAX_TEXT: Final = 500


class Result(NamedTuple):
    """One line from a worker; `last` if the process ends after it. `cpu`: CPU seconds of the process so far, including
    children that have ended."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    seconds: float
    cpu: float
    last: bool


def serve(channel: socket.socket, verifier: Callable[[Row], object], memory_mb: int) -> None:
    """Answers chunks of rows until the other end closes. Exceptions of a verifier become results."""
    limit_memory(memory_mb)
    sys.stdout = sys.stderr  # unbuffered: nothing is lost when the process is killed
    for line in channel.makefile("rb"):
        for row in json.loads(line):
            result = judge(verifier, Row(*row))
            channel.sendall(json.dumps(result).encode() + b"\n")
            if result.last:
                return


def judge(verifier: Callable[[Row], object], row: Row) -> Result:
    """One row's result; any exception of the verifier, even SystemExit, is an `error`."""
    started = time.perf_counter()
    last = False
    try:
        verdict = as_verdict(verifier(row))
    except MemoryError:
        verdict, last = Verdict(0.0, "error", detail="the verifier needed more memory than reward.memory_mb"), True
    except BaseException as error:
        verdict = Verdict(0.0, "error", detail=_describe(error))
    seconds = time.perf_counter() - started
    texts = _text(verdict.parsed), _text(verdict.detail)
    return Result(verdict.reward, verdict.verdict, *texts, seconds, _cpu_seconds(), last or _left_running())


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


def leave(status: int) -> None:
    """Ends a forked process without running its parent's exit handlers."""
    sys.stderr.flush()
    os._exit(status)
