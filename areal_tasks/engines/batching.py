"""Requests that are asked for in one turn of the event loop are completed together, whoever asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

W = TypeVar("W")


@dataclass(eq=False)
class _Chunk:
    """What is completed together, and how many callers wait for a part of it."""

    task: asyncio.Task[None]
    callers: int = 0

    def leave(self) -> None:
        """A caller has what it wants, or gives up. Without callers the work ends."""
        self.callers -= 1
        if not self.callers:
            self.task.cancel()


@dataclass(eq=False)
class _Call(Generic[W]):
    works: list[W]
    begun: asyncio.Future[None]
    chunks: list[_Chunk] = field(default_factory=list)


class Batcher(Generic[W]):
    """`complete` brings a list of works to its end; `chunks` cuts what has gathered into such lists. For one loop."""

    def __init__(
        self,
        complete: Callable[[list[W]], Coroutine[Any, Any, None]],
        chunks: Callable[[list[W]], list[list[W]]],
    ) -> None:
        self._complete = complete
        self._chunks = chunks
        self._calls: list[_Call[W]] = []  # of this turn

    async def complete(self, works: list[W]) -> None:
        """Return when all works have ended. Raises what one of the lists raised that they are in."""
        loop = asyncio.get_running_loop()
        call = _Call(works, loop.create_future())
        if not self._calls:
            loop.call_soon(self._begin)  # after all that is ready in this turn
        self._calls.append(call)
        try:
            await call.begun
            await asyncio.gather(*(asyncio.shield(chunk.task) for chunk in call.chunks))
        finally:
            for chunk in call.chunks:
                chunk.leave()

    def _begin(self) -> None:
        calls, self._calls = [call for call in self._calls if not call.begun.done()], []  # done: it has given up
        callers = {id(work): call for call in calls for work in call.works}
        for works in self._chunks([work for call in calls for work in call.works]):
            chunk = _Chunk(asyncio.ensure_future(self._complete(works)))
            for call in dict.fromkeys(callers[id(work)] for work in works):
                call.chunks.append(chunk)
                chunk.callers += 1
        for call in calls:
            call.begun.set_result(None)
