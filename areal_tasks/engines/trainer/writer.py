"""Puts drafts into the store, one at a time: at once, or beside the trainer's other work.

Beside other work a draft first copies what it writes into host memory. Then each rank writes its own part in a thread
that takes no part in any collective; what all ranks have written is brought together when somebody asks for it, in the
thread of the commands. The copy is kept, and written again if need be, until that has succeeded. Where host memory is
short of one, the draft is written at once.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.storage import WriteResult

from areal_tasks.engines.trainer.drafts import Draft, Part
from areal_tasks.engines.trainer.memory import host_room, ran_out
from areal_tasks.engines.trainer.process_group import gather_objects
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.files import upload
from areal_tasks.store.local import unusable
from schemas.errors import UserError
from schemas.manifest import FileRef

log = logging.getLogger(__name__)
#: The most of the host memory that is left which a copy may take: what else grows meanwhile would be killed for it.
ROOM: Final = 0.8
REMEDY: Final = "give the machine or the job more memory, or keep less in it: fewer servers, no store in /dev/shm"


@dataclass(frozen=True)
class Task:
    """A draft on its way below `prefix`, by way of `folder` on this machine: the store's own where that is here."""

    draft: Draft
    prefix: str
    folder: Path
    beside: bool


@dataclass(frozen=True)
class Done:
    """What a rank has to say of its part: its files in the store, or why there are none, or that it is not done."""

    files: tuple[FileRef, ...] = ()
    account: tuple[WriteResult, ...] = ()
    error: str = ""
    away: bool = False  # the error: the store cannot be reached
    busy: bool = False


_BUSY: Final = Done(busy=True)


@dataclass(frozen=True)
class Stored:
    """A draft that is in the store, below `prefix`."""

    prefix: str
    files: tuple[FileRef, ...]


class Writer:
    """Writes one task at a time. Every rank makes the same calls in the same order, from its thread of the commands."""

    def __init__(self, store: Store, first: bool) -> None:
        self.store = store
        self.first = first  # this is rank 0
        self._had: dict[type[Draft], int] = {}  # host memory that drafts have had, which torch keeps for the next
        self.task: Task | None = None
        self._done: Future[Done] = Future()
        self._last: Stored | None = None  # for whoever has not got the answer

    def begin(self, task: Task) -> bool:
        """Write `task`; returns when that is done, or at once (True) if it can be `beside` other work. `free` first."""
        assert self.task is None, "one at a time"
        self.task = replace(task, beside=task.beside and self._fits(task) and self._holds(task))
        self._start(self.task)
        return self.task.beside

    def settle(self, wait: bool) -> Stored | None:
        """What came into the store last; None while something is being written, or if nothing has been.

        Raises:
            UserError: a rank could not write. What is written beside other work is being written again.
        """
        task = self.task
        if task is None:
            return self._last
        try:
            parts = _agreed(self._done.result() if wait or self._done.done() else _BUSY)
            if any(part.busy for part in parts):
                return None
            rest = _agreed(self._completed(task, parts))
        except UserError:
            self._failed(task)
            raise
        except Exception:  # a mistake of this program, which would come again
            self._forget(task)
            raise
        self._forget(task)
        files = [file for part in (*parts, *rest) for file in part.files]
        self._last = Stored(task.prefix, tuple(sorted(files, key=lambda file: file.path)))
        return self._last

    def free(self) -> None:
        """Wait for what is being written, and forget it: nobody has asked. Raises what nobody has been told."""
        if self.task is not None:
            self.task = replace(self.task, beside=False)
            self.settle(wait=True)

    def _fits(self, task: Task) -> bool:
        """Whether the machine has room for the copies of all ranks; they agree."""
        mine = task.draft.host_bytes()
        asked = 0 if mine <= self._had.get(type(task.draft), 0) else mine
        found = gather_objects((asked, host_room()))
        wanted, room = sum(bytes_ for bytes_, _ in found), min(left for _, left in found)
        if wanted <= ROOM * room:
            return True
        sizes = f"a copy would take {wanted / 2**30:.1f} GiB of host memory, and {room / 2**30:.1f} GiB are left"
        log.warning("%s is written while the run waits: %s; %s", task.prefix, sizes, REMEDY)
        return False

    def _holds(self, task: Task) -> bool:
        """Copy into host memory, if all ranks can."""
        refused, mine = "", task.draft.host_bytes()
        try:
            task.draft.hold()
            self._had[type(task.draft)] = mine
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            refused = str(error)
            log.warning("%s is written while the run waits: no copy of it: %s; %s", task.prefix, refused, REMEDY)
        return not any(gather_objects(refused))

    def _start(self, task: Task) -> None:
        self._done = Future()
        done = self._done
        if task.beside:
            work = (self.store, task, done)
            threading.Thread(target=_write, args=work, name="durable-write", daemon=True).start()
        else:
            _write(self.store, task, done)

    def _completed(self, task: Task, parts: list[Done]) -> Done:
        """The last files, which rank 0 writes."""
        if not self.first:
            return Done()
        return _tried(self.store, task, lambda: task.draft.finish([part.account for part in parts]))

    def _failed(self, task: Task) -> None:
        if task.beside:
            self._done.exception()  # waits, where another rank failed sooner
            self._start(task)
        else:
            self._forget(task)

    def _forget(self, task: Task) -> None:
        self.task = None
        if self.store.local(task.prefix) is None:
            shutil.rmtree(task.folder, ignore_errors=True)


def _write(store: Store, task: Task, done: Future[Done]) -> None:
    try:
        done.set_result(_tried(store, task, lambda: task.draft.write(task.folder)))
    except Exception as error:  # a mistake of this program: raised where the result is asked for
        done.set_exception(error)


def _tried(store: Store, task: Task, make: Callable[[], Part]) -> Done:
    """What a rank says of the files that `make` makes, once they are in the store."""
    try:
        part = make()
        return Done(upload(store, task.prefix, task.folder, part.known, part.names), part.account)
    except OSError as error:
        return _failure(task, unusable(error.filename or store.uri(task.prefix), error))
    except UserError as error:
        return _failure(task, error)


def _failure(task: Task, error: UserError) -> Done:
    log.warning("%s was not written: %s", task.prefix, error)
    return Done(error=str(error), away=isinstance(error, Unavailable))


def _agreed(mine: Done) -> list[Done]:
    """What all ranks say. Raises StoreError on each of them if one has failed; Unavailable where the store is away."""
    found = gather_objects(mine)
    for rank, done in enumerate(found):
        if done.error:
            text = done.error if len(found) == 1 else f"rank {rank}: {done.error}"
            raise Unavailable(text) if done.away else StoreError(text)
    return found
