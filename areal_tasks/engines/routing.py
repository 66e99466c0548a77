"""Which server a request goes to: the one that will probably be done first, by what it has been seen to do.

Nothing here waits or talks to anybody: the pool tells what begins and ends, and asks. A server's speed is measured
in two ways, because an accelerator takes about as long for one request as for many until it is full, and then longer
in proportion: how long its requests take, and how many samples it finishes in a second of work.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

AFFINITIES: Final = 65536  # groups whose server is remembered
WINDOW: Final = 256  # samples after which old measurements count half
RISE: Final = 1.001  # the least duration seen is forgotten at this rate a request
SLACK: Final = 1.25  # a server is trusted with so much more than it has been seen to do at once, lest it stay neglected
TIE: Final = 1.05  # durations within this factor are the same; then the server with less to do is taken


@dataclass(eq=False)
class Server:
    """One server as the client sees it."""

    url: str
    slots: int  # requests it may have under way
    healthy: bool = True
    evicted: float = 0.0  # when, by the router's clock
    requests: int = 0  # under way
    asks: int = 0  # requests and orders that it has not answered
    knows: bool = True  # which weights it holds: not while it loads some, nor if nobody has seen that end well
    lends: bool = False  # the memory of its cache, to the trainer: it must not generate
    load: int = 0  # samples under way
    done: float = 0.0  # samples finished, old ones counting less
    busy: float = 0.0  # seconds it took them
    latency: float | None = None  # seconds of a request that does not have to wait
    seen: float = 0.0  # when `busy` was brought up to date

    @property
    def open(self) -> bool:
        """Whether it may take one more request."""
        return self.healthy and self.requests < self.slots

    @property
    def seconds_per_sample(self) -> float | None:
        """Seconds of work in which it finishes a sample; None until it has finished one."""
        return self.busy / self.done if self.done else None


@dataclass
class Router:
    """The servers, what they have under way, and what is known of their speed."""

    servers: list[Server]
    clock: Callable[[], float] = time.monotonic
    affinity: OrderedDict[int, Server] = field(default_factory=OrderedDict)

    def choose(self, group: int, samples: int, waiting: int) -> Server | None:
        """The server for a request of `samples` samples, when `waiting` samples (these included) have none.

        None: it should wait, because no server has room or because every one that has would still be at it when the
        others could have done everything. While that is so, some request is under way.
        """
        free = [server for server in self.servers if server.open]
        if not free:
            return None
        known = self.affinity.get(group)
        if known is not None and known.open:
            return known
        expected = {server: self._expected(server, samples) for server in self.servers if server.healthy}
        quickest = min(free, key=expected.__getitem__)
        worthwhile = max(self._all_done(waiting), min(expected.values()))
        if expected[quickest] > worthwhile:
            return None
        alike = [s for s in free if not self._full(s, samples) and expected[s] <= TIE * expected[quickest]]
        return min(alike, key=lambda server: server.load, default=quickest)

    def begin(self, server: Server, group: int, samples: int) -> float:
        """A request goes to `server`; the time."""
        self.affinity[group] = server
        self.affinity.move_to_end(group)
        if len(self.affinity) > AFFINITIES:
            self.affinity.popitem(last=False)
        now = self._account(server)
        server.requests += 1
        server.load += samples
        return now

    def end(self, server: Server, samples: int, started: float, finished: bool) -> None:
        """The request is over; `finished`: it was answered in full, so that it says something about the speed."""
        now = self._account(server)
        server.requests -= 1
        server.load -= samples
        if not finished:
            return
        server.done += samples
        if server.done > WINDOW:
            server.done, server.busy = server.done / 2, server.busy / 2
        seconds = now - started
        server.latency = seconds if server.latency is None else min(seconds, RISE * server.latency)

    def _account(self, server: Server) -> float:
        """Count the time since the last event as busy if there was anything under way; the time."""
        now = self.clock()
        if server.load:
            server.busy += now - server.seen
        server.seen = now
        return now

    def _expected(self, server: Server, samples: int) -> float:
        """Seconds until `server` would have finished `samples` more."""
        return self._work(server, samples) if self._full(server, samples) else self._latency(server)

    def _full(self, server: Server, samples: int) -> bool:
        """Whether `samples` more would make everything on `server` take longer."""
        return self._work(server, samples) > SLACK * self._latency(server)

    def _work(self, server: Server, samples: int) -> float:
        return (server.load + samples) * self._each(server)

    def _latency(self, server: Server) -> float:
        """The usual duration of the server's requests; one that is not measured yet counts as average."""
        return _mean(s.latency for s in self.servers) if server.latency is None else server.latency

    def _each(self, server: Server) -> float:
        """The server's seconds per sample; one that is not measured yet counts as average."""
        each = server.seconds_per_sample
        return each or _mean(s.seconds_per_sample for s in self.servers) or 1.0

    def _all_done(self, waiting: int) -> float:
        """Seconds in which all healthy servers together finish everything there is."""
        healthy = [server for server in self.servers if server.healthy]
        return (waiting + sum(s.load for s in healthy)) / sum(1 / self._each(s) for s in healthy)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
