"""The router against simulated servers: how much of their summed capacity it uses, and how it shares samples out."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.engines.routing import choose
from areal_tasks.engines.server import Server

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


@dataclass
class Request:
    """One in flight: its samples' lengths, how many have not ended, the server, and what is known of its begin."""

    lengths: Lengths
    left: int
    server: Server
    began: float
    learns: bool


class Simulation:
    """Batches of requests that all arrive at once; the next batch comes when the last request has ended.

    Servers that are `ready_at` a later time than the batch's begin load weights until then.
    """

    def __init__(self, machines: Sequence[Batching], slots: int) -> None:
        self.now = 0.0
        self.machines = machines
        self.servers = [Server(str(i), slots) for i in range(len(machines))]
        self.requests = 0
        self.tokens = [0] * len(machines)
        self.running: dict[int, Request] = {}
        self.waiting: deque[Lengths] = deque()

    def batch(
        self, batch: Sequence[Lengths], ready_at: Sequence[float] = (), fails: tuple[float, int] = (math.inf, 0)
    ) -> float:
        """Run a batch; the seconds that it took. `tokens` counts what each server was given of it.

        `ready_at`: for each server; `fails`: when a server fails, and which. Both in seconds after the begin.
        """
        began, events = self.now, [(at, partial(self._ready, i)) for i, at in enumerate(ready_at)]
        fail = (fails[0], partial(self._fail, fails[1]))
        events = deque(sorted([*events, fail, (math.inf, fail[1])], key=lambda event: event[0]))
        self.tokens, self.waiting = [0] * len(self.machines), deque(batch)
        for server in self.servers if ready_at else ():
            server.current, server.loads = False, True
        while self.waiting or self.running:
            while self.waiting and self._start():
                pass
            at, machine = min((machine.next_end(), i) for i, machine in enumerate(self.machines))
            assert min(at, began + events[0][0]) < math.inf, "something waits, and nothing is there that could wake it"
            if began + events[0][0] <= at:
                self.now = max(self.now, began + events[0][0])
                events.popleft()[1]()
            else:
                self.now = at
                self._end(self.machines[machine].end())
        return self.now - began

    def _ready(self, server: int) -> None:
        self.servers[server].current, self.servers[server].loads = True, False

    def _fail(self, server: int) -> None:
        """Its requests begin again elsewhere, before those that wait."""
        self.servers[server].healthy, self.machines[server].ends = False, []
        lost = [number for number, one in self.running.items() if one.server is self.servers[server]]
        self.waiting.extendleft(self.running.pop(number).lengths for number in reversed(lost))

    def _start(self) -> bool:
        lengths = self.waiting[0]
        demand = sum(len(one.lengths) for one in self.running.values()) + sum(map(len, self.waiting))
        server = choose(self.servers, 0, len(lengths), demand)
        if server is None:
            return False
        self.waiting.popleft()
        learns = server.done > 0 and all(one.may_generate for one in self.servers)
        self.running[self.requests] = Request(lengths, len(lengths), server, self.now, learns)
        server.begin(len(lengths), self.now)
        index = self.servers.index(server)
        self.machines[index].add(self.now, self.requests, lengths)
        self.tokens[index] += sum(lengths)
        self.requests += 1
        return True

    def _end(self, number: int) -> None:
        """A sample of a request has ended."""
        request = self.running[number]
        request.left -= 1
        if not request.left:
            del self.running[number]
            request.server.end(len(request.lengths), self.now)
            if request.learns:
                others = (server.speed for server in self.servers if server is not request.server)
                request.server.speed.answered(self.now - request.began, request.lengths, others)


# ── how samples are shared out ──────────────────────────────────────────────────────────────────────────────────────


def alike(source: random.Random) -> int:
    return 400


def skewed(source: random.Random) -> int:
    """As completions are: a median of 600 tokens, a mean of 970, a few thousands."""
    return min(8192, max(1, int(source.lognormvariate(math.log(600), 1))))


def batches(length: Callable[[random.Random], int], count: int, groups: int = 64, seed: int = 7) -> list[list[Lengths]]:
    """Each of so many groups of 8 samples."""
    source = random.Random(seed)
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
    assert max(totals) <= 1.15 * min(totals)


@pytest.mark.parametrize("length", [alike, skewed])
def test_a_server_half_as_fast_gets_less_where_requests_wait(length: Callable[[random.Random], int]) -> None:
    fixed, each = FULL
    simulation = Simulation([Batching(fixed, 2 * each), Batching(fixed, each)], slots=8)
    [batch] = batches(length, 1, groups=256)
    simulation.batch(batch)
    assert simulation.tokens[0] / sum(simulation.tokens) == pytest.approx(1 / 3, rel=0.15)


def use(slower: float, count: int, slots: int, work: Sequence[Sequence[Lengths]]) -> float:
    """The share of the summed capacity that batches use while one of the servers is slower; without the first three."""
    fixed, each = FULL
    simulation = Simulation([Batching(fixed, each * (slower if i == 0 else 1)) for i in range(count)], slots)
    times = [simulation.batch(batch) for batch in work]
    tokens = sum(sum(map(sum, batch)) for batch in work[3:])
    return tokens * each / (sum(times[3:]) * (count - 1 + 1 / slower))


@pytest.mark.parametrize("count", [2, 4])
@given(groups=st.integers(48, 192))
@settings(max_examples=5, deadline=None)
def test_a_server_that_is_five_times_slower_costs_a_tenth_at_most(count: int, groups: int) -> None:
    """All samples are equally long, and in flight from the beginning: nothing is left for the one that ends first."""
    assert use(5, count, 1000, batches(alike, 8, groups)) >= 0.9


@pytest.mark.parametrize("count", [2, 4])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=3, deadline=None)
def test_so_it_does_where_lengths_differ_as_completions_do(count: int, seed: int) -> None:
    """A batch ends with its longest samples, also on equal servers: unless requests wait, it has to do as well."""
    assert use(5, count, 8, batches(skewed, 5, 256, seed)) >= 0.9
    at_once = batches(skewed, 8, 64, seed)
    assert use(5, count, 1000, at_once) >= 0.85 * use(1, count, 1000, at_once)


@pytest.mark.parametrize("kind", [FULL, (4.2e-3, 1.35e-5)])
def test_a_difference_that_has_gone_is_forgotten(kind: tuple[float, float]) -> None:
    fixed, each = kind
    machines = [Batching(5 * fixed, 5 * each), Batching(fixed, each)]
    simulation = Simulation(machines, 1000)
    for batch in batches(alike, 6):
        simulation.batch(batch)
    assert simulation.tokens[1] > 3 * simulation.tokens[0]
    machines[0].fixed, machines[0].each = fixed, each
    for batch in batches(alike, 40):
        simulation.batch(batch)
    assert simulation.tokens[0] == pytest.approx(simulation.tokens[1], rel=0.1)


@pytest.mark.parametrize(("fixed", "each"), [FULL, EMPTY])
@given(first=st.floats(0.01, 2), later=st.floats(0, 2), slots=st.integers(32, 100), groups=st.integers(16, 64))
@settings(max_examples=10, deadline=None)
def test_servers_that_have_new_weights_one_after_the_other_get_equally_much(
    fixed: float, each: float, first: float, later: float, slots: int, groups: int
) -> None:
    """The first one has room for all of it, and leaves the other its share."""
    simulation = Simulation([Batching(fixed, each) for _ in range(2)], slots)
    for batch in batches(alike, 2, groups):
        simulation.batch(batch, [first, first + later])
        assert min(simulation.tokens) >= 0.45 * sum(simulation.tokens) - 400 * 8


@given(slower=st.floats(1, 1.2), each=st.floats(0, 2e-5), late=st.floats(2, 9))
@settings(max_examples=15, deadline=None)
def test_what_one_server_did_while_the_other_could_not_moves_no_shares(slower: float, each: float, late: float) -> None:
    """On a GPU a step takes hardly longer for more samples: who had fewer seems slow by its tokens per second.

    Where it does take longer (`each` above some 1.2e-5), one batch is shared out 44:56 now and then.
    """
    least = 0.45 if each <= 1e-5 else 0.4
    simulation = Simulation([Batching(4e-3 * slower, each * slower), Batching(4e-3, each)], 1000)
    work = batches(alike, 8, 64)
    for batch in work[:2]:
        simulation.batch(batch, [late, 0.0])
    for batch in work[2:]:
        simulation.batch(batch)
        assert min(simulation.tokens) >= least * sum(simulation.tokens)


@given(at=st.floats(0, 12), slots=st.sampled_from([8, 1000]), seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_what_a_server_had_when_it_failed_goes_to_the_others_at_once(at: float, slots: int, seed: int) -> None:
    """So a batch takes no longer than one server needs for the rest and for what is lost."""
    fixed, each = FULL
    simulation = Simulation([Batching(fixed, each) for _ in range(2)], slots)
    [batch] = batches(alike, 1, 64, seed)
    capacity, whole = 1 / each, sum(map(sum, batch))
    seconds = simulation.batch(batch, fails=(at, 0))
    assert seconds <= max(at, 0) + (whole - min(at * capacity, whole / 2)) / capacity + 1e-6


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
        one.begin(1, 0.0)
    for _ in range(64):
        one.end(1, 0.0)
    given: Any = {one.url: 0, other.url: 0}
    for _ in range(64):
        server = choose(simulation.servers)
        assert server is not None
        server.begin(1, 0.0)
        given[server.url] += 1
    assert given == {one.url: 32, other.url: 32}


def test_requests_one_after_another_are_shared_out() -> None:
    servers = [Server("a", 4), Server("b", 4)]
    for _ in range(10):
        server = choose(servers)
        assert server is not None
        server.begin(1, 0.0)
        server.end(1, 0.0)
    assert [server.done for server in servers] == [5, 5]


def test_a_server_that_seems_slow_keeps_getting_requests_and_is_forgiven() -> None:
    """After a stall: without answers nothing would correct what is known of it."""
    quick, slow = Server("quick", 8), Server("slow", 8)
    slow.speed.slowness, quick.load, quick.requests = 1e3, 64, 8
    assert choose([quick, slow], 0, 8, 200) is slow
    slow.begin(8, 0.0)
    assert choose([quick, slow], 0, 8, 200) is None, "it has more than its share"
    for _ in range(3000):
        slow.speed.adapt(1.0, 1e3)
    assert slow.speed.slowness < 10


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
