"""Writes a checkpoint in a thread of each rank, while the trainer runs other commands; at most one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from areal_tasks.engines.trainer.checkpoint import Saving
from areal_tasks.engines.trainer.checkpoint_files import Copies, Hashed
from areal_tasks.engines.trainer.fencing import StaleCommand
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.memory import host_room, ran_out
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.local import unusable
from areal_tasks.store.parallel import in_background
from areal_tasks.temporary import OwnedFolder
from schemas.errors import first_line
from schemas.manifest import FileRef

log = logging.getLogger(__name__)
#: The share of the free host memory that the copies of a machine's ranks may take: other processes grow meanwhile.
ROOM: Final = 0.8


@dataclass
class CheckpointWriter:
    """This rank's part in the checkpoints. All ranks make the same calls in the same order, from one thread."""

    store: Store
    group: Group
    copies: Copies = field(default_factory=Copies)
    prefix: str = ""  # of the checkpoint that is being written, or was written last
    _saving: Saving = field(init=False)
    _temporary: OwnedFolder | None = None  # holds the files on their way to a store elsewhere
    _written: Future[list[Hashed]] | None = None
    _files: tuple[FileRef, ...] | None = None  # once all ranks have written
    _allocated: Future[None] | None = None  # when memory for copies is there, or is known to be lacking

    def prepare(self, plan: Callable[[Path], Saving]) -> None:
        """Once, begin to allocate the memory for copies of what `plan` plans, in a thread; it stays.

        For a GPU it is page-locked, which takes 4 s at 1.5 B parameters; the first checkpoint would wait for it.
        """
        if self._allocated is not None:
            return
        room = host_room()
        with self.group.together(partial(OwnedFolder, "plan")) as folder:
            needs = _needs(plan(Path(folder)).tensors)

        def allocate() -> None:  # without the tensors, of which the trainer may load others meanwhile
            started = time.perf_counter()
            why = self._allocate(*needs, room)
            log.info("memory for checkpoints: %s", why or f"allocated in {time.perf_counter() - started:.3f} s")

        self._allocated = in_background(allocate, "checkpoint-memory")

    def begin(self, prefix: str, plan: Callable[[Path], Saving]) -> None:
        """Begin to write what `plan` plans to write into a folder; when this returns, that may change.

        It is written at once where host memory has no room for a copy. StoreError: a rank cannot make its folder.
        """
        self._wait()  # for one that nothing asks for, as for that of an earlier start of the flow
        self._clean()
        self.prefix, self._written, self._files = "", None, None
        started, room = time.perf_counter(), host_room()  # before any rank of this machine takes of it
        folder = self.group.together(partial(self._fresh_folder, prefix))
        with usable(self.store, prefix):
            self._saving = saving = plan(folder)
        if not saving.held:
            if why := self._allocate(*_needs(saving.tensors), room):
                log.warning("the trainer waits while its checkpoint is written: %s", why)
            else:
                saving.hold(self.copies)
        self.prefix = prefix
        self._written = in_background(partial(self._write, prefix, saving, started), "checkpoint")
        if saving.held:
            log.info("copied a checkpoint in %.3f s: %s", time.perf_counter() - started, prefix)
        else:
            wait([self._written])

    def finish(self, prefix: str, waits: bool) -> tuple[FileRef, ...] | None:
        """The files below `prefix`, on every rank; None while a rank writes, unless this `waits`.

        StaleCommand: nothing is being written there, by a new process or after an error. StoreError: a rank failed.
        """
        if prefix != self.prefix or self._written is None:
            raise StaleCommand(f"no checkpoint is being written below {prefix}")
        if waits:
            wait([self._written])
        if self._files is None:
            self._files = self._finished(prefix, self._written)
        return self._files

    def _finished(self, prefix: str, written: Future[list[Hashed]]) -> tuple[FileRef, ...] | None:
        try:
            with usable(self.store, prefix):
                found = self._saving.finish(
                    lambda: written.result() if written.done() else None, partial(self._put, prefix)
                )
        except Exception:
            self.prefix = ""
            wait([written])  # another rank has failed: this one may still write
            self._clean()
            raise
        if found is None:
            return None
        self._clean()
        return tuple(FileRef(path=f"{prefix}/{name}", sha256=sha, bytes=n) for name, (sha, n) in sorted(found.items()))

    def _fresh_folder(self, prefix: str) -> Path:
        """The store's own folder if that is on this disk; else one of this rank, outside of what `clear` deletes."""
        if (folder := self.store.local(prefix)) is not None:
            return folder
        with usable(self.store, prefix):
            self._temporary = OwnedFolder("checkpoint")
        return Path(self._temporary.name)

    def _clean(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _wait(self) -> None:
        """Wait until no thread uses the copies."""
        threads: list[Future[Any]] = [thread for thread in (self._allocated, self._written) if thread is not None]
        wait(threads)

    def _allocate(self, sizes: Sequence[int], page_locked: bool, room: int) -> str:
        """Allocate memory for copies of tensors of these sizes; otherwise say why there is none."""
        asked = self.copies.lacking(sizes) * self.group.ranks_here
        if asked > ROOM * room:
            return f"copies would take {asked >> 20} MiB of host memory, and {room >> 20} are free"
        try:
            self.copies.allocate(sizes, page_locked)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            return first_line(error)
        return ""

    def _write(self, prefix: str, saving: Saving, started: float) -> list[Hashed]:
        with usable(self.store, prefix):
            written = saving.write(partial(self._put, prefix))
        log.info("wrote a checkpoint in %.3f s: %s", time.perf_counter() - started, prefix)
        return written

    def _put(self, prefix: str, name: str) -> None:
        """Make a file durable, or move it to a store elsewhere."""
        file = self._saving.folder / name
        self.store.put_file(f"{prefix}/{name}", file)
        if self._temporary is not None:
            file.unlink()


def _needs(tensors: Sequence[Tensor]) -> tuple[list[int], bool]:
    """The bytes of each of these tensors, and whether copies of them are to be page-locked."""
    return [tensor.nbytes for tensor in tensors], any(tensor.is_cuda for tensor in tensors)


@contextmanager
def usable(store: Store, prefix: str) -> Iterator[None]:
    """If a file of the store cannot be written, the error names it and the remedy."""
    try:
        yield
    except OSError as error:
        raise unusable(error.filename or store.uri(prefix), error) from error
