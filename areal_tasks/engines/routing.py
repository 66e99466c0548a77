"""Which server a request goes to: the one that has the least to do for its speed.

What a server has to do is counted in samples. All servers count as equally fast until a difference is certain. Nothing
here waits or talks to a server: the pool says what begins and ends, and asks.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

AFFINITIES: Final = 65536  # groups whose server is remembered
ENOUGH: Final = 16  # requests of each server that a comparison of speeds needs
WINDOW: Final = 256  # requests after which old measurements count half
CERTAIN: Final = 1.15  # a smaller factor between speeds is no reason to change them
SLOWEST: Final = 1 / 16  # of the mean speed: such a server still gets enough to show that it has become faster


@dataclass
class Work:
    """What a server did: requests, their tokens, the seconds it took and the sum of samples under way over time."""

    requests: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    sample_seconds: float = 0.0

    def add(self, other: Work) -> None:
        """Count `other` as well; once there are many requests, everything counts half."""
        scale = 0.5 if self.requests + other.requests > WINDOW else 1.0
        for name, more in vars(other).items():
            setattr(self, name, scale * (getattr(self, name) + more))


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
    failing_since: float | None = None  # the first failure since it last answered, by the router's clock
    failures: int = 0  # since then
    admitted: float = 0.0  # when it was let in
    requests: int = 0  # under way
    asks: int = 0  # requests and orders that it has not answered
    paused: bool = False  # it was told to stop generating, or may have been, and not yet to go on
    lends: bool = False  # the memory of its cache, to the trainer: it must not generate
    load: int = 0  # samples under way
    speed: float = 1.0  # relative to the other servers
    done: float = 0.0  # samples answered
    work: Work = field(default_factory=Work)  # since speeds were last changed, but for what is under way
    now: Work = field(default_factory=Work)  # since it last had nothing to do
    seen: float = 0.0  # when `now` was brought up to date

    @property
    def able(self) -> bool:
        """Whether it may generate."""
        return self.healthy and self.current

    def finish(self, samples: int) -> float:
        """When it would have done `samples` more, in arbitrary units."""
        return (self.load + samples) / self.speed


@dataclass
class Router:
    """The servers, what they have under way, and what is known of their speed."""

    servers: list[Server]
    clock: Callable[[], float] = time.monotonic
    affinity: OrderedDict[int, Server] = field(default_factory=OrderedDict)

    def choose(self, group: int, samples: int, waiting: int) -> Server | None:
        """The server for a request of `samples` samples of `group`; `waiting` samples, these included, have none.

        Among servers that have equally much to do, it is the one that has the group's prompt in its cache. None: no
        server has room, or only such as would still be at it when the others could have done all that waits.
        """
        able = [server for server in self.servers if server.able]
        free = [server for server in able if server.requests < server.slots]
        if not free:
            return None
        least = min(server.finish(samples) for server in free)
        level = (waiting + sum(s.load for s in able)) / sum(s.speed for s in able)  # that all could reach together
        if least > max(level, min(server.finish(samples) for server in able)):
            return None
        alike = [server for server in free if server.finish(samples) <= least * (1 + 1e-9)]
        known = self.affinity.get(group)
        return known if known in alike else min(alike, key=lambda server: server.done / server.speed)

    def begin(self, server: Server, group: int, samples: int) -> None:
        """A request goes to `server`."""
        self.affinity[group] = server
        self.affinity.move_to_end(group)
        if len(self.affinity) > AFFINITIES:
            self.affinity.popitem(last=False)
        self._account(server)
        server.requests += 1
        server.load += samples

    def end(self, server: Server, samples: int, tokens: int) -> None:
        """The request is over, in which so many tokens were generated."""
        self._account(server)
        server.requests -= 1
        server.load -= samples
        server.done += samples
        server.now.requests += 1
        server.now.tokens += tokens
        if not server.load:  # before that, tokens are not counted that time was spent on
            server.work.add(server.now)
            server.now = Work()
            self._compare()

    def _account(self, server: Server) -> None:
        """Count the time since the last event."""
        now = self.clock()
        server.now.seconds += (now - server.seen) * bool(server.load)
        server.now.sample_seconds += (now - server.seen) * server.load
        server.seen = now

    def _compare(self) -> None:
        """Change the speeds if they are certainly wrong.

        A server's speed can be taken from its tokens a second, or from how quickly the tokens of a sample follow each
        other. The first rises with what it has to do until it is full, the second falls from there on: so the truth
        lies between them, and a difference that comes of unequal load is not taken for one of speed.
        """
        able = [server for server in self.servers if server.able]
        works = [server.work for server in able]
        if len(able) < 2 or min(w.requests for w in works) < ENOUGH or not all(w.tokens for w in works):
            return
        rates = _relative([w.tokens / w.seconds for w in works])
        paces = _relative([w.tokens / w.sample_seconds for w in works])
        speeds = _relative([server.speed for server in able])
        found = [sorted(three)[1] for three in zip(rates, paces, speeds, strict=True)]
        if max(max(new / old, old / new) for new, old in zip(found, speeds, strict=True)) < CERTAIN:
            return
        for server, speed in zip(able, found, strict=True):
            server.speed, server.work = max(speed, SLOWEST), Work()


def _relative(values: Sequence[float]) -> list[float]:
    """The values over their geometric mean."""
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return [value / mean for value in values]
