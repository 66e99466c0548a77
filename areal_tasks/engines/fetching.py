"""Weights of a store in a folder of this machine, for engines to load.

Weights of a remote store are fetched into memory, once for all processes of a user that load them at the same time.
Each process has a shared lock on the folder, which ends with the process; the last one to release it removes the
folder. Folders of killed processes are removed when the next weights are fetched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Final

from areal_tasks.store.backend import Store
from areal_tasks.store.commit import read_record
from areal_tasks.store.objects.files import common_folder, digest_of, materialise
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsManifest

MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "arealflow-weights-"  # of folders in memory
FETCHES: Final = ".fetches"  # a file that is locked while the folder's others are fetched


class Fetched:
    """Weights in memory: the newest, which an evicted server may load later, and the previous ones.

    A server may still be loading the previous ones: SGLang crashes if they are removed.
    """

    def __init__(self) -> None:
        self._before, self._last = ExitStack(), ExitStack()

    def hold(self, folder: AbstractContextManager[Path]) -> Path:
        """Use `folder`, which holds newer weights than all before."""
        self.release_older()
        return self._last.enter_context(folder)

    def release_older(self) -> None:
        """Release all weights but the last: newer ones exist, in this memory or not."""
        self._before.close()
        self._before, self._last = self._last, ExitStack()

    def close(self) -> None:
        """Release all weights: no server loads them any longer."""
        self._before.close()
        self._last.close()


def local_weights(store: Store, files: Sequence[FileRef]) -> AbstractContextManager[Path]:
    """A folder of this machine with these files, verified, which engines load inside this context.

    Those of a store on this machine are loaded from there; others are fetched into memory. UserError, possibly only on
    entering: a file is damaged.
    """
    if (folder := store.local(common_folder(files))) is None:
        return in_memory(store, files)
    return nullcontext(materialise(store, files, folder, verify=True))


def weights_folder(store: Store, source: str) -> AbstractContextManager[Path]:
    """A local folder with the files of `source`, a folder or a manifest's URL. Errors as of `local_weights`."""
    stem = store.uri("x")[:-1]
    if "://" in source and not source.startswith(stem):
        raise UserError(f"{source} is not in this server's store ({store.url}); publish the weights there")
    if not source.startswith(stem) or Path(source).is_dir():
        return nullcontext(Path(source))
    return local_weights(store, read_record(store, source.removeprefix(stem), WeightsManifest).files)


@contextmanager
def in_memory(store: Store, files: Sequence[FileRef]) -> Iterator[Path]:
    """A folder in memory with these files of a remote store, inside this context. Another process may use it, too.

    Files are verified before they get their names, so that one that is there in full size need not be.
    """
    remove_unused()
    folder = memory() / f"{PREFIX}{os.getuid()}-{digest_of(files)}"
    lock = _enter(folder)
    try:
        if folder.stat().st_uid != os.getuid():
            raise UserError(f"{folder} belongs to another user, who could change the weights in it: remove it")
        with (folder / FETCHES).open("w") as fetches:
            fcntl.flock(fetches, fcntl.LOCK_EX)
            for partial in folder.rglob(".*.*"):  # of a process that was killed
                partial.unlink()
            materialise(store, files, folder)
        yield folder
    finally:
        _leave(folder, lock)


def memory() -> Path:
    return MEMORY if MEMORY.is_dir() else Path(gettempdir())


def remove_unused() -> None:
    """Remove the folders in memory that no process uses. Those of other users cannot be opened, and stay."""
    for folder in memory().glob(f"{PREFIX}*"):
        with suppress(OSError):
            _leave(folder, _opened(folder))


def _enter(folder: Path) -> int:
    """A shared lock on the folder, which is created if it is missing."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            lock = _opened(folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(folder, lock):
                return lock
            os.close(lock)  # it was removed meanwhile


def _leave(folder: Path, lock: int) -> None:
    """Release the lock, and remove the folder if no other process has one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(folder, lock):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_at(folder: Path, lock: int) -> bool:
    """Whether `folder` is still the one that `lock` has open, not a new one of that name."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(lock))
    except FileNotFoundError:
        return False
