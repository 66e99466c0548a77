"""Verifiers that do what verifiers do. The completion says which; anything else is judged by its length."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from areal_tasks.rewards.protocol import Verdict

HOARD: list[bytes] = []
NOT_CALLABLE = 3


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def loop_in_python() -> None:
    while True:
        pass


def loop_in_c() -> None:
    """Holds the interpreter's lock for years: no signal handler written in Python would ever run."""
    re.match(r"(a|aa)+$", "a" * 200 + "b")


def eat_memory() -> None:
    while True:
        HOARD.append(bytes(2**24))


def segfault() -> None:
    ctypes.string_at(0)


def burn(seconds: float) -> None:
    """Uses so much CPU, however long that takes."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


BURN = "import time\nwhile time.process_time() < {}: pass"


def start_to_burn(seconds: float, session: bool = False) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", BURN.format(seconds), os.environ["MISBEHAVING_NAP"]]
    return subprocess.Popen(command, start_new_session=session)


def kill_the_forkserver() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)  # it is ended with its parent


def pass_the_gate(folder: str) -> None:
    """Says that it is there, and waits for the gate to open."""
    Path(folder, "reached").touch()
    while not Path(folder, "open").exists():
        time.sleep(0.01)  # until the test opens it


def start_a_process_and_hang() -> None:
    subprocess.Popen(["sleep", os.environ["MISBEHAVING_NAP"]])
    time.sleep(1000)  # it hangs


def start_a_process_and_leave() -> None:
    subprocess.Popen(["sleep", os.environ["MISBEHAVING_NAP"]])
    os._exit(0)


def fork_and_wait(code: int) -> float:
    """The reward is the exit status of a child, which returns or raises like the parent."""
    if (child := os.fork()) == 0:
        return sys.exit(code) if code else 0.5
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def start_a_daemon() -> float:
    """A process of a session of its own, whose parent has ended."""
    subprocess.run(["sh", "-c", f"setsid sleep {os.environ['MISBEHAVING_NAP']} &"], check=True)
    return 1.0


def write_into_every_descriptor() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"garbage\n")
        except OSError:
            continue
    time.sleep(1000)  # it hangs


def raise_unprintable() -> None:
    raise Unprintable


ACTS: dict[str, Any] = {
    "loop": loop_in_python,
    "regex": loop_in_c,
    "sleep": lambda: time.sleep(1000),  # it hangs
    "nap": lambda: time.sleep(2.0) or 1.0,  # it waits, and uses no CPU
    "busy child": lambda: start_to_burn(1000).wait(),
    "busy session": lambda: start_to_burn(1000, session=True).wait(),
    "late": lambda: burn(1.0) or 1.0,
    "late child": lambda: start_to_burn(1.0).wait() or 1.0,
    "kill": kill_the_forkserver,
    "gate": lambda: pass_the_gate(os.environ["MISBEHAVING_GATE"]) or 1.0,
    "background": lambda: start_to_burn(1000) and 1.0,
    "memory": eat_memory,
    "segfault": segfault,
    "leave": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "raise": lambda: {}["missing"],
    "unprintable": raise_unprintable,
    "recurse": lambda: ACTS["recurse"](),
    "child": start_a_process_and_hang,
    "fork": lambda: fork_and_wait(0),
    "fork and exit": lambda: fork_and_wait(7),
    "session": lambda: start_to_burn(1000, session=True) and 1.0,
    "daemon": start_a_daemon,
    "abandon": start_a_process_and_leave,
    "garbage": write_into_every_descriptor,
    "abort": os.abort,
    "print": lambda: print("a verifier's print"),
    "nothing": lambda: None,
    "string": lambda: "1.0",
    "nan": lambda: float("nan"),
    "huge": lambda: Verdict(1e39, "correct"),
    "bad verdict": lambda: Verdict(1.0, "right"),  # type: ignore[arg-type]
    "long": lambda: Verdict(1.0, "correct", "é\ud800" * 10_000, "x" * 10_000),
    "thread": lambda: threading.Thread(target=loop_in_c).start(),
}


def act(prompt: str, completion: str, answer: str) -> object:
    if completion in ACTS:
        return ACTS[completion]()
    return float(len(completion))


def unparseable(prompt: str, completion: str, answer: str) -> Verdict:
    return Verdict(0.75, "unparseable")


def returns_process_id(prompt: str, completion: str, answer: str) -> Verdict:
    return Verdict(1.0, "correct", str(os.getpid()))


def old_signature(prompt: str, completion: str, answer: str, **arguments: Any) -> Verdict:
    return Verdict(1.0, "correct", repr(arguments))


def takes_more(prompt: str, completion: str, answer: str, stop_reason: str, *, truncated: bool = True) -> Verdict:
    return Verdict(1.0, "correct", f"{truncated} {stop_reason}")


def takes_two(prompt: str, completion: str) -> float:
    return 0.0
