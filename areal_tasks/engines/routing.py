"""Which server a request goes to: the one that has the least to do, counted in samples.

A slower server has requests under way for longer, and so gets fewer of them. Nothing here waits or talks to a server:
the pool says what begins and ends, and asks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

AFFINITIES: Final = 65536  # groups whose server is remembered


@dataclass(frozen=True)
class Target:
    """Weights that all servers are to hold. `key` tells apart what has one version, such as two attempts at it.

    `uri` says where servers load them from; none: they can only be handed over by the trainer.
    """

    version: int
    key: str = ""
    uri: str | None = None


@dataclass(eq=False)
class Server:
    """One server as the client sees it."""

    url: str
    slots: int  # requests it may have under way
    start: int = 0  # tells processes at the same address apart
    healthy: bool = True
    current: bool = True  # it holds the weights that are wanted
    failing_since: float | None = None  # the first failure since it last answered, by the pool's clock
    failures: int = 0  # since then
    admitted: float = 0.0  # when it was let in
    requests: int = 0  # under way
    asks: int = 0  # requests and orders that it has not answered
    paused: bool = False  # it was told to stop generating, or may have been, and not yet to go on
    lends: bool = False  # the memory of its cache, to the trainer: it must not generate
    load: int = 0  # samples under way
    done: int = 0  # samples answered

    @property
    def able(self) -> bool:
        """Whether it may generate."""
        return self.healthy and self.current


@dataclass
class Router:
    """The servers, and what they have under way."""

    servers: list[Server]
    affinity: OrderedDict[int, Server] = field(default_factory=OrderedDict)

    def choose(self, group: int) -> Server | None:
        """The server for a request of `group`; none if no server that may generate has room.

        Among servers that have equally much to do, it is the one that has the group's prompt in its cache.
        """
        free = [server for server in self.servers if server.able and server.requests < server.slots]
        if not free:
            return None
        least = min(server.load for server in free)
        alike = [server for server in free if server.load == least]
        known = self.affinity.get(group)
        return known if known in alike else min(alike, key=lambda server: server.done)

    def begin(self, server: Server, group: int, samples: int) -> None:
        """A request goes to `server`."""
        self.affinity[group] = server
        self.affinity.move_to_end(group)
        if len(self.affinity) > AFFINITIES:
            self.affinity.popitem(last=False)
        server.requests += 1
        server.load += samples

    def end(self, server: Server, samples: int) -> None:
        """The request is over."""
        server.requests -= 1
        server.load -= samples
        server.done += samples
