"""The router against simulated servers: how much of their summed capacity it uses, and how it shares samples out."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.engines.server import Server, choose

Lengths = list[int]  # of a request's samples


@dataclass
class Batching:
    """All samples together: a step gives each a token, and takes `fixed + each * samples` seconds."""

    fixed: float
    each: float
    steps: float = 0.0  # since the beginning
    now: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)  # in steps since the beginning

    @property
    def step(self) -> float:
        return self.fixed + self.each * len(self.ends)

    def advance(self, now: float) -> None:
        self.steps += (now - self.now) / self.step if self.ends else 0.0
        self.now = now

    def add(self, now: float, request: int, lengths: Lengths) -> None:
        self.advance(now)
        for length in lengths:
            heapq.heappush(self.ends, (self.steps + length, request))

    def next_end(self) -> float:
        return self.now + max(0.0, self.ends[0][0] - self.steps) * self.step if self.ends else math.inf

    def end(self) -> int:
        self.advance(self.next_end())
        return heapq.heappop(self.ends)[1]


class Simulation:
    """Batches of requests that all arrive at once; the next batch comes when the last request has ended."""

    def __init__(self, machines: Sequence[Batching], slots: int) -> None:
        self.now = 0.0
        self.machines = machines
        self.servers = [Server(str(i), slots) for i in range(len(machines))]
        self.requests = 0
        self.tokens = [0] * len(machines)

    def batch(self, batch: Sequence[Lengths]) -> float:
        """Run a batch; the seconds that it took. `tokens` counts what each server was given of it."""
        began, waiting = self.now, deque(batch)
        self.tokens = [0] * len(self.machines)
        running: dict[int, tuple[Server, Lengths, int]] = {}
        while waiting or running:
            while waiting and self._start(waiting, running):
                waiting.popleft()
            assert running, "something waits, and nothing is under way that could wake it"
            machine = min(self.machines, key=lambda machine: machine.next_end())
            self.now = machine.next_end()
            request = machine.end()
            server, lengths, left = running.pop(request)
            if left > 1:
                running[request] = server, lengths, left - 1
            else:
                server.end(len(lengths))
        return self.now - began

    def _start(self, waiting: Sequence[Lengths], running: dict[int, tuple[Server, Lengths, int]]) -> bool:
        lengths = waiting[0]
        server = choose(self.servers)
        if server is None:
            return False
        server.begin(len(lengths))
        index = self.servers.index(server)
        self.machines[index].add(self.now, self.requests, lengths)
        self.tokens[index] += sum(lengths)
        running[self.requests] = server, lengths, len(lengths)
        self.requests += 1
        return True


# ── how samples are shared out ──────────────────────────────────────────────────────────────────────────────────────


def alike(source: random.Random) -> int:
    return 400


def skewed(source: random.Random) -> int:
    """As completions are: a median of 600 tokens, a mean of 970, a few thousands."""
    return min(8192, max(1, int(source.lognormvariate(math.log(600), 1))))


def batches(length: Callable[[random.Random], int], count: int, groups: int = 64) -> list[list[Lengths]]:
    """Each of so many groups of 8 samples."""
    source = random.Random(7)
    return [[[length(source) for _ in range(8)] for _ in range(groups)] for _ in range(count)]


FULL = (0.0, 1e-4)  # a step takes as long as it has samples: the server is full, its capacity is 10,000 tokens a second
EMPTY = (5e-3, 1e-5)  # a step takes hardly longer for more samples


@pytest.mark.parametrize("length", [alike, skewed])
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize(("fixed", "each"), [FULL, EMPTY])
@pytest.mark.parametrize("count", [2, 4])
def test_equal_servers_get_equally_much(
    count: int, fixed: float, each: float, slots: int, length: Callable[[random.Random], int]
) -> None:
    simulation = Simulation([Batching(fixed, each) for _ in range(count)], slots)
    totals = [0] * count
    for batch in batches(length, 12):
        simulation.batch(batch)
        totals = [total + tokens for total, tokens in zip(totals, simulation.tokens, strict=True)]
    assert max(totals) <= 1.1 * min(totals)


@pytest.mark.parametrize("length", [alike, skewed])
def test_a_server_half_as_fast_gets_less_where_requests_wait(length: Callable[[random.Random], int]) -> None:
    fixed, each = FULL
    simulation = Simulation([Batching(fixed, 2 * each), Batching(fixed, each)], slots=8)
    [batch] = batches(length, 1, groups=256)
    simulation.batch(batch)
    assert simulation.tokens[0] / sum(simulation.tokens) == pytest.approx(1 / 3, rel=0.15)


def test_two_servers_are_nearly_twice_as_fast_as_one() -> None:
    fixed, each = FULL
    for length in (alike, skewed):
        batch = batches(length, 1)[0]
        one, two = (Simulation([Batching(fixed, each) for _ in range(count)], 64).batch(batch) for count in (1, 2))
        assert one / two >= 1.85, length


def test_a_server_that_joins_late_gets_what_comes_until_it_has_as_much_to_do() -> None:
    fixed, each = EMPTY
    simulation = Simulation([Batching(fixed, each) for _ in range(2)], 1000)
    late = simulation.servers[1]
    for batch in batches(skewed, 8):
        late.healthy = False
        simulation.batch(batch[:32])
        late.healthy = True
        simulation.batch(batch[32:])
        assert simulation.tokens[0] == pytest.approx(simulation.tokens[1], rel=0.5)


# ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_groups_that_were_all_on_one_server_are_shared_out_again() -> None:
    """As an evaluation's are whose prompts were asked while the other server was away."""
    simulation = Simulation([Batching(*FULL) for _ in range(2)], 64)
    one, other = simulation.servers
    for _ in range(64):
        one.begin(1)
    for _ in range(64):
        one.end(1)
    given: Any = {one.url: 0, other.url: 0}
    for _ in range(64):
        server = choose(simulation.servers)
        assert server is not None
        server.begin(1)
        given[server.url] += 1
    assert given == {one.url: 32, other.url: 32}


def test_requests_one_after_another_are_shared_out() -> None:
    servers = [Server("a", 4), Server("b", 4)]
    for _ in range(10):
        server = choose(servers)
        assert server is not None
        server.begin(1)
        server.end(1)
    assert [server.done for server in servers] == [5, 5]


def test_without_an_able_server_nothing_is_chosen() -> None:
    servers = [Server("a", 4, healthy=False), Server("b", 4, current=False)]
    assert choose(servers) is None


@given(
    each=st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=6),
    slots=st.integers(1, 64),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=100),
)
def test_nothing_waits_for_ever(each: list[float], slots: int, sizes: list[int]) -> None:
    simulation = Simulation([Batching(1e-3, one) for one in each], slots)
    for _ in range(3):
        simulation.batch([[10] * size for size in sizes])
    assert all(s.load == s.requests == 0 for s in simulation.servers)
