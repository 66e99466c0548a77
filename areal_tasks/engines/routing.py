"""Which server gets a request: each has its share of the samples in flight and waiting, so that all end together.

A server's share follows from how fast it has been, compared with the others. By two measures, since a server's speed
depends on what it has to do: where decoding takes no longer for more samples, one with fewer seems slow by its tokens
per second; where it takes twice as long for twice as many, one with fewer seems quick by the pace of each sample. A
share is reduced as long as the pace is lower than that of the others, and never further than both measures allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from areal_tasks.engines.server import Server

KEPT: Final = 0.998  # of what is known, at each answer of any server: about the last five hundred count
GAIN: Final = 0.02  # in how small steps, one at each answer, shares approach those with which all have one pace
ALIKE: Final = 1.25  # servers that differ by less get the same, so that chance does not move shares


@dataclass
class Speed:
    """What a server's answers say of its speed: sums in which the latest count most. `slowness`: 1 ÷ its share."""

    slowness: float = 1.0
    seconds: float = 0.0  # of the requests, each from sending it to its answer
    longest: float = 0.0  # tokens of the longest sample of each
    busy: float = 0.0  # seconds in which any request was in flight
    tokens: float = 0.0  # of all samples
    unanswered: float = 0.0  # busy seconds since the last answer
    since: float = 0.0  # when the number of its requests changed last

    def passed(self, now: float, busy: bool) -> None:
        """Note that the server was `busy`, or not, until `now`."""
        self.unanswered += (now - self.since) * busy
        self.since = now

    def answered(self, seconds: float, lengths: Sequence[int], others: Iterable[Speed]) -> None:
        """Note an answer of samples with so many tokens, and compare the server with the others."""
        self.seconds += seconds
        self.longest += max(lengths)
        self.busy += self.unanswered
        self.tokens += sum(lengths)
        self.unanswered = 0.0
        known = [one for one in (self, *others) if one.known]
        if len(known) > 1:
            pace, in_sum = (_mean(map(of, known)) for of in (Speed.by_pace, Speed.in_sum))
            for one in known:
                one.adapt(one.by_pace() / pace, one.in_sum() / in_sum)

    @property
    def known(self) -> bool:
        return min(self.seconds, self.longest, self.busy, self.tokens) > 0

    def by_pace(self) -> float:
        """Seconds per token of a sample."""
        return self.seconds / self.longest

    def in_sum(self) -> float:
        """Seconds per token that the server generates."""
        return self.busy / self.tokens

    def adapt(self, by_pace: float, in_sum: float) -> None:
        """Adapt `slowness` to how many times slower it was than the mean of the servers; forget a little of that."""
        least, most = sorted((by_pace, in_sum))
        self.slowness = min(max(self.slowness**KEPT * by_pace**GAIN, least), most)
        self.seconds, self.longest = KEPT * self.seconds, KEPT * self.longest
        self.busy, self.tokens = KEPT * self.busy, KEPT * self.tokens


def choose(servers: Iterable[Server], floor: int = 0, samples: int = 1, demand: float = math.inf) -> Server | None:
    """The server for a request for so many samples: the one that has the least to do for its share.

    `demand`: samples in flight and waiting. None if there is no server that may generate, is known to hold version
    `floor` or a newer one and has room; or if none of these has less than its share, and another one is to have the
    request: one without room at the moment, or that is `coming`. A server without any request gets one whatever its
    share, if there are enough: only its answers can tell that it is no longer slow.
    """
    counted = [one for one in servers if one.coming or _is_able(one, floor)]
    slowness = _slowness(counted)
    in_all, order = sum(1 / s for s in slowness), list(zip(counted, slowness, strict=True))
    order.sort(key=lambda one: ((one[0].load + samples) * one[1], not _is_able(one[0], floor), one[0].done))
    for place, (server, slow) in enumerate(order):
        has_room = _is_able(server, floor) and server.requests < server.slots
        fits = place == 0 or server.load + samples <= demand / slow / in_all
        unheard = server.requests == 0 and demand > samples * len(order)
        if has_room and (fits or unheard):
            return server
    return None


def _is_able(server: Server, floor: int) -> bool:
    return server.may_generate and (server.version or 0) >= floor


def _slowness(servers: Sequence[Server]) -> list[float]:
    """Of each server; 1 of all if they differ so little that it may be chance."""
    found = [server.speed.slowness for server in servers]
    return found if max(found, default=1) > ALIKE * min(found, default=1) else [1.0] * len(found)


def _mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
