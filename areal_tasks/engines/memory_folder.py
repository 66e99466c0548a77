"""Folders in memory. Making one removes those that killed processes have left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

PREFIX: Final = "arealflow-weights-"
#: A folder exists for a moment before it is locked.
YOUNG_SECONDS: Final = 60.0


class MemoryFolder(TemporaryDirectory[str]):
    """An empty folder below `parent` (None: the temporary folder), with a lock that ends with the process."""

    def __init__(self, parent: Path | None) -> None:
        sweep(parent or Path(gettempdir()))
        super().__init__(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._lock: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove the folder and its contents."""
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(parent: Path) -> None:
    """Remove the folders of processes that have ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Whether no process holds the folder's lock. False for a folder of another user, which cannot be opened."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime > YOUNG_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
