"""A rollout worker in the event loop of the flow's tracker: all that it does, but for HTTP and processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.rollout.link import Link, WorkerLost
from areal_tasks.rollout.orders import Busy, Event, Lease, Orders, Part, Written
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.store.backend import Content, Store, StoreError, open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Sample

T = TypeVar("T")
SAYS_SO: Final = "the test says so"
_FOLDER = tempfile.TemporaryDirectory(prefix="rollouts-")


def some_store() -> Store:
    """A store of its own for a test that does not look into it."""
    return open_store(Path(_FOLDER.name, new_attempt()).as_uri())


class FailingStore(LocalBackend):
    """A store whose next `times` writes, and reads if it is `blind`, raise a `failure`.

    `late`: what is written is stored nevertheless.
    """

    failure: type[StoreError] = StoreError
    times, late, blind = 0, False, False

    def create(self, path: str, data: bytes) -> None:
        self._write(super().create, path, data)

    def put_pieces(self, path: str, pieces: Content) -> None:
        self._write(super().put_pieces, path, pieces)

    def read(self, path: str) -> bytes:
        return self._read(super().read, path)

    def size(self, path: str) -> int:
        return self._read(super().size, path)

    def _write(self, write: Callable[..., None], *arguments: object) -> None:
        if not self.times or self.late:
            write(*arguments)
        self._fail()

    def _read(self, read: Callable[[str], T], path: str) -> T:
        if self.blind:
            self._fail()
        return read(path)

    def _fail(self) -> None:
        if self.times:
            self.times -= 1
            raise self.failure(SAYS_SO)


class Near:
    """What a `Link` is to the flow. `lose` is what it sees when the process is killed."""

    def __init__(self, url: str, flow: Rollouts, make: Callable[[Callable[[Event], None]], Groups]) -> None:
        self.url, self.busy = url, Busy(requests={}, store="full")
        self.start: int | None = None
        self._flow, self._loop = flow, asyncio.get_running_loop()
        self.groups = make(lambda event: self._soon(self._tell, event))
        self.gone, self.ready, self.tried, self.explained, self.leaving = False, False, False, False, False
        self.retired = False
        self._soon(self._begin)

    @property
    def link(self) -> Link:
        return cast(Link, self)

    def _begin(self) -> None:
        self.tried = True
        try:
            self.start = self.groups.writer.open()
        except StoreError:  # as a link does it
            self._soon(self._begin)
            return
        self.ready = True
        self._flow.begun(self.link)

    def lose(self) -> None:
        self.gone = True
        self._flow.lost(self.link)

    def give(self, leases: list[Lease]) -> None:
        self._soon(self.groups.apply, Orders(begin=tuple(leases)))

    def take_back(self, numbers: list[int]) -> None:
        self._soon(self.groups.apply, Orders(forget=tuple(numbers)))

    async def follow(self, serving: Any) -> None:
        """The scene's servers need no telling."""

    async def requests(self) -> dict[str, int]:
        return {}

    async def write(self, part: Part) -> Written:
        if self.gone:
            raise WorkerLost("killed")
        return await self.groups.write(part)

    async def flush(self) -> None:
        await self.groups.flush()

    async def leave(self) -> None:
        self.groups.leave()

    async def close(self) -> None:
        await self.groups.close()

    async def drop(self) -> None:
        self.gone = True

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon(lambda: None if self.gone else call(*arguments))

    def _tell(self, event: Event) -> None:
        self._flow.received(self.link, event)


class Here(Rollouts):
    """Rollouts with near workers, `"0"` and so on by their addresses."""

    rows: pa.Table  # of the last iteration

    def near(self, url: str = "0") -> Near:
        return cast(Near, next(link for link in self.links.by_start.values() if link.url == url))

    @property
    def finished(self) -> dict[int, list[Sample]]:
        """In the memory of workers, and the flow knows it."""
        held = [held for link in self.links.by_start.values() for held in cast(Near, link).groups.finished.values()]
        return {one.index: one.samples for one in held if one.index in self.tracker.finished.of}

    @property
    def live(self) -> dict[int, int]:
        """The live groups' versions."""
        return self.tracker.running.of | self.tracker.finished.of

    async def groups(self, workers: int = 1) -> list[int]:
        """The groups that the next iteration takes."""
        if not self.links.by_start:
            await self.use_workers({(str(n), 0) for n in range(workers)})
        parts = await self.take(f"run/iteration/attempt={new_attempt()}")
        self.rows = pa.concat_tables([read_table(self.spool.store, part.tables["rollout"]) for part in parts])
        assert self.rows["group_id"].to_pylist() == sorted(self.rows["group_id"].to_pylist())
        assert sum(part.samples for part in parts) == len(self.rows)
        return cast(list[int], pc.unique(self.rows["group_id"]).to_pylist())
