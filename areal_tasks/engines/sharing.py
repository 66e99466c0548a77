"""Servers that several clients generate on: one looks after them, the others do as it says.

The client that looks after the servers gives them weights, pauses them and finds out which are well. Before that
changes which of them may generate it tells the others, and waits until they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pydantic import BaseModel, ConfigDict


class SharedServer(BaseModel):
    """A server, which of its starts it is, what it is known to hold, and whether requests may be sent to it now."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    start: int
    version: int | None
    able: bool


class Serving(BaseModel):
    """The servers of a run. `versions_unknown`: what they answer to requests under way counts for nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: tuple[SharedServer, ...]
    versions_unknown: bool = False


class Followers(Protocol):
    """The other clients, as the one that looks after the servers sees them."""

    def changed(self) -> None:
        """Something may have changed that they are to know."""
        ...

    async def told(self) -> None:
        """Return when they know what there is to know."""
        ...

    async def busy(self) -> Mapping[str, int]:
        """Their requests under way, by the server's address."""
        ...

    def under_way(self) -> Mapping[str, int]:
        """The same, as far as is known without asking them."""
        ...


class NoFollowers:
    """Nobody else generates on the servers."""

    def changed(self) -> None:
        """There is nobody to tell."""

    async def told(self) -> None:
        """There is nobody to tell."""

    async def busy(self) -> Mapping[str, int]:
        return {}

    def under_way(self) -> Mapping[str, int]:
        return {}
