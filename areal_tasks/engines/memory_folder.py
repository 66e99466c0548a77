"""Folders in memory that do not stay there when whoever made them is killed: the next one made removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

PREFIX: Final = "arealflow-weights-"
#: A folder may be there a moment before it is held.
YOUNG_SECONDS: Final = 60.0


class MemoryFolder(TemporaryDirectory[str]):
    """An empty folder below `parent` (none: where temporary files go), held by a lock that ends with the process."""

    def __init__(self, parent: Path | None) -> None:
        sweep(parent or Path(gettempdir()))
        super().__init__(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._mark: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._mark, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove the folder with all that is in it."""
        super().cleanup()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None


def sweep(parent: Path) -> None:
    """Remove the folders whose processes have ended without doing so."""
    for folder in parent.glob(f"{PREFIX}*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Whether nobody holds the folder any more. Of those of others, which we may not look into, nothing is known."""
    try:
        mark = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(mark).st_mtime > YOUNG_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(mark)
