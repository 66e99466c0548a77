"""Servers that several clients generate on: one client manages them, the others follow it.

The managing client gives the servers weights, pauses them and finds out which are healthy. Before new weights change
which servers may generate, it notifies the followers and waits until they have acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from schemas.record import Record


class SharedServer(Record):
    """A server: its address and start number, the version it is known to hold, whether it may generate now or soon."""

    url: str
    start: int
    version: int | None
    may_generate: bool
    coming: bool = False


class Serving(Record):
    """The servers of a run, with at most `requests` in flight each; `versions_unknown`: answers must be discarded."""

    servers: tuple[SharedServer, ...]
    versions_unknown: bool
    requests: int


class Followers:
    """The other clients, as the managing client sees them: those of each of its `parts`. At first there is none."""

    def __init__(self) -> None:
        self.parts: list[Followers] = []

    def changed(self) -> None:
        """Notify them, without waiting, that `ServerPool.serving` may have changed."""
        for part in self.parts:
            part.changed()

    async def acknowledged(self) -> None:
        """Return when they have acknowledged the current `serving`."""
        await asyncio.gather(*(part.acknowledged() for part in self.parts))

    async def busy(self) -> Mapping[str, int]:
        """Their requests in flight, by the server's address."""
        return sum(map(Counter, await asyncio.gather(*(part.busy() for part in self.parts))), Counter[str]())

    def under_way(self) -> Mapping[str, int]:
        """The same, as last reported, without asking them."""
        return sum((Counter(part.under_way()) for part in self.parts), Counter[str]())
