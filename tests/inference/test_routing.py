"""The router against simulated servers: how much of their summed capacity it uses."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.engines.routing import Router, Server


@dataclass
class Machine:
    """`lanes` requests at a time, in order of arrival, each of which takes `seconds`."""

    lanes: int
    seconds: float
    free_at: list[float] = field(default_factory=list)

    def finish(self, now: float) -> float:
        """When a request that arrives now is done."""
        started = now if len(self.free_at) < self.lanes else max(now, heapq.heappop(self.free_at))
        heapq.heappush(self.free_at, started + self.seconds)
        return started + self.seconds

    @property
    def capacity(self) -> float:
        return self.lanes / self.seconds


class Simulation:
    """Batches of requests that all arrive at once; the next batch comes when the last request has ended."""

    def __init__(self, machines: list[Machine], slots: int) -> None:
        self.now = 0.0
        self.machines = machines
        servers = [Server(str(i), slots) for i in range(len(machines))]
        self.router = Router(servers, clock=lambda: self.now)
        self.groups = 0
        self.given = [0] * len(machines)

    def batch(self, requests: int) -> float:
        """Run a batch; the share of the summed capacity that was used meanwhile."""
        began, waiting = self.now, deque(range(requests))
        ends: list[tuple[float, int, int, float]] = []
        while waiting or ends:
            while waiting and self._start(len(waiting), ends):
                waiting.popleft()
            assert ends, "something waits, and nothing is under way that could wake it"
            self.now, _, index, started = heapq.heappop(ends)
            self.router.end(self.router.servers[index], 1, started, finished=True)
        return requests / ((self.now - began) * sum(m.capacity for m in self.machines))

    def _start(self, waiting: int, ends: list[tuple[float, int, int, float]]) -> bool:
        self.groups += 1
        server = self.router.choose(self.groups, 1, waiting)
        if server is None:
            return False
        index = self.router.servers.index(server)
        self.given[index] += 1
        started = self.router.begin(server, self.groups, 1)
        heapq.heappush(ends, (self.machines[index].finish(self.now), self.groups, index, started))
        return True


@pytest.mark.parametrize("slots", [8, 16, 2000])
@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("servers", [2, 4, 8])
def test_one_server_five_times_slower_costs_a_tenth_at_most(servers: int, lanes: int, slots: int) -> None:
    machines = [Machine(lanes, 5.0 if i == 0 else 1.0) for i in range(servers)]
    simulation = Simulation(machines, slots)
    simulation.batch(servers * lanes * 80)  # the first batch is for getting to know them
    assert min(simulation.batch(servers * lanes * 80) for _ in range(5)) >= 0.9


def test_already_the_first_batch_adapts_where_requests_wait() -> None:
    machines = [Machine(8, 5.0 if i == 0 else 1.0) for i in range(4)]
    assert Simulation(machines, slots=8).batch(1600) >= 0.9


def test_equal_servers_are_used_alike_again_after_they_were_not() -> None:
    simulation = Simulation([Machine(1000, 1.0) for _ in range(2)], slots=1000)
    for server, share in zip(simulation.router.servers, (10, 90), strict=True):  # it happened so, for whatever reason
        server.done, server.busy, server.latency = float(share), 1.0, 1.0
    shares = []
    for _ in range(60):
        before = simulation.given[0]
        simulation.batch(100)
        shares.append(simulation.given[0] - before)
    assert shares[0] < 20 and shares[-1] >= 45


def test_a_single_request_goes_to_the_quicker_server() -> None:
    simulation = Simulation([Machine(8, 5.0), Machine(8, 1.0)], slots=8)
    simulation.batch(200)
    assert all(simulation.router.choose(-i - 1, 1, 1) is simulation.router.servers[1] for i in range(3))


def test_a_group_stays_where_it_is_unless_that_is_full_or_ill() -> None:
    router = Router([Server("a", 1), Server("b", 1)])
    first = router.choose(7, 2, 2)
    assert first is not None
    started = router.begin(first, 7, 2)
    elsewhere = router.choose(7, 2, 2)
    assert elsewhere is not None and elsewhere is not first, "full"
    router.end(first, 2, started, finished=True)
    assert router.choose(7, 2, 2) is first
    first.healthy = False
    assert router.choose(7, 2, 2) is elsewhere


def test_without_a_healthy_server_nothing_is_chosen() -> None:
    assert Router([Server("a", 4, healthy=False)]).choose(0, 1, 1) is None


@given(
    speeds=st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 10)), min_size=1, max_size=6),
    slots=st.integers(1, 64),
    requests=st.integers(1, 200),
)
def test_nothing_waits_for_ever(speeds: list[tuple[int, float]], slots: int, requests: int) -> None:
    simulation = Simulation([Machine(lanes, seconds) for lanes, seconds in speeds], slots)
    for _ in range(3):
        simulation.batch(requests)
    assert all(s.load == s.requests == 0 for s in simulation.router.servers)
