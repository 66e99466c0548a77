"""The folder that the processes of one test run share; it exists as long as one of them runs.

These are xdist's workers, the process that starts them, and everything that they start: `FOLDER` is in the environment
of each.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FOLDER: Final = "AREAL_TEST_FOLDER"
#: A pipe that each pytest process holds open for writing: at its end, none of them runs any more.
ALIVE: Final = "alive"


def folder() -> Path:
    return Path(os.environ[FOLDER])


@contextmanager
def opened() -> Iterator[None]:
    """The folder exists during the block of each pytest process. The process that created it removes it."""
    made = FOLDER not in os.environ
    if made:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="arealflow-tests-")
        os.mkfifo(folder() / ALIVE)
    alive = os.open(folder() / ALIVE, os.O_RDWR)
    try:
        yield
    finally:
        os.close(alive)
        if made:
            shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Held by one process or thread of the test run at a time."""
    with (folder() / f"{name}.lock").open("a") as lock:  # closed, and so released, even where the process is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` fills once per test run. Tests must not change it."""
    made = folder() / name
    with locked(name):
        if not made.exists():
            partial = made.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed, or of a `make` that failed
            partial.mkdir()
            make(partial)
            partial.rename(made)
    return made
