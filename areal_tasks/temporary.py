"""Temporary folders that do not stay when their process is killed: the next one that makes such a folder removes them.

A folder belongs to the processes that hold the lock on a file in it. The kernel releases that when they end, however
they end, and also where processes of several containers share the place of temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

PREFIX: Final = "arealflow-"
LOCK: Final = ".owner"


class OwnedFolder(TemporaryDirectory[str]):
    """A new folder `arealflow-NAME-…`. `cleanup` removes it, as does the end of this object.

    `lock` may be passed on to a process that uses the folder longer than this one lives.
    """

    def __init__(self, name: str) -> None:
        sweep()
        while True:
            super().__init__(prefix=f"{PREFIX}{name}-", ignore_cleanup_errors=True)
            lock = Path(self.name, LOCK)
            self.lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            self._unlock = weakref.finalize(self, os.close, self.lock)
            if _is_free(self.lock) is not False and lock.exists():
                return
            self.cleanup()  # another process has found it before it was locked

    def cleanup(self) -> None:
        """Remove the folder, and let go of the lock."""
        super().cleanup()
        self._unlock()


def sweep() -> None:
    """Remove the folders of processes that have ended."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, not one of these, or removed meanwhile
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                if _is_free(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _is_free(lock: int) -> bool | None:
    """Whether no process had the lock, which this one has then; None if the file system knows no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
