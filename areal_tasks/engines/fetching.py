"""Fetches weights from a store elsewhere while the trainer still writes them.

An object is whole once a listing shows it, and the trainer's answer tells each file's SHA-256. So what has come before
that answer needs only be compared with it, and when the last file is written little is left to fetch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from areal_tasks.store.backend import Store
from areal_tasks.store.files import materialise
from areal_tasks.store.parallel import beside
from schemas.manifest import FileRef

Files = tuple[FileRef, ...]
log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.05  # between two listings
FILES: Final = 16  # at once, each by many threads


class Fetching:
    """Files below `prefix`, a fresh attempt, on their way into the empty `into`, hidden until they are verified."""

    def __init__(self, store: Store, prefix: str, into: Path) -> None:
        self._store, self._prefix, self._into = store, prefix, into
        self._coming: dict[str, Future[str]] = {}  # SHA-256 of what came, by path
        self._pool = ThreadPoolExecutor(FILES, "weights")
        self._written = threading.Event()

    def watch(self) -> None:
        """Begin to fetch each file that appears, until `stop`. Raises nothing: `finish` fetches what is missing."""
        try:
            while not self._written.wait(LOOK_SECONDS):
                self._begin(self._store.list(self._prefix))
        except Exception as error:
            log.warning("new weights are fetched when all are written, not while they are: %s", error)

    def stop(self) -> None:
        """Look for no more files."""
        self._written.set()

    def finish(self, files: Sequence[FileRef]) -> None:
        """Make `into` hold exactly `files`, all that were written. Not while `watch` is under way.

        Raises:
            UserError: a file cannot be fetched, or has another SHA-256 than recorded, again and again.
        """
        self._begin([file.path for file in files])
        told = {file.path: file.sha256 for file in files}
        verified = {path for path, came in self._coming.items() if self._take(path, came, told.get(path))}
        if missing := [file for file in files if file.path not in verified]:
            materialise(self._store, missing, self._into, verify=True)

    def close(self) -> None:
        """Begin no more; returns when nobody writes into the folder."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, paths: Sequence[str]) -> None:
        for path in paths:
            if path not in self._coming and _is_file(self._name(path)):
                self._coming[path] = self._pool.submit(self._store.fetch_file, path, self._hidden(path))

    def _take(self, path: str, came: Future[str], sha256: str | None) -> bool:
        """Whether a file came as it was written: then it gets its name, else it goes."""
        if (error := came.exception()) is not None:
            log.warning("%s could not be fetched yet: %s", self._store.uri(path), error)
        elif came.result() == sha256:
            self._hidden(path).replace(self._into / self._name(path))
            return True
        self._hidden(path).unlink(missing_ok=True)
        return False

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self._prefix}/")

    def _hidden(self, path: str) -> Path:
        return self._into / f".{self._name(path)}"


def _is_file(name: str) -> bool:
    """Whether it lies in the folder itself and is not hidden, as files of weights are: a listing is no authority."""
    return bool(name) and "/" not in name and not name.startswith(".")


def fetch_meanwhile(store: Store, prefix: str, into: Path, write: Callable[[], Files]) -> Files:
    """What `write` has written below `prefix`, fetched into `into` while it wrote, and verified.

    If it fails, nobody writes into `into` any more.

    Raises:
        UserError: a file cannot be fetched, or does not have the SHA-256 that `write` tells.
    """
    found = Fetching(store, prefix, into)
    try:
        with beside(found.watch):
            try:
                files = write()
            finally:
                found.stop()
        found.finish(files)
    finally:
        found.close()
    return files
