"""Runs that lose a machine, a link or the head: they go on, and are complete.

A module of its own, so that it and the other runs on machines are tested at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pytest
from waiting import LIMIT, wait_until

from machines.clusters import CONTROL, HEAD, Cluster, OnStarters, pause
from machines.runs import SYSTEMS, Run, query, services, slurm_and_ray

#: Until generation runs again after a node is lost, where another node is free.
AGAIN_SECONDS: Final = 90.0


@pytest.mark.slow("a run of a minute, in which a lease ends")
@pytest.mark.parametrize(
    ("cluster", "service"),
    [(OnStarters, "inference-0"), *((kind, "trainer") for kind in SYSTEMS)],
    indirect=["cluster"],
)
def test_a_run_goes_on_after_a_node_has_vanished(cluster: Cluster, service: str) -> None:
    run = Run(cluster)
    lost = run.host(service)
    cluster.bed[lost].kill()
    gone = time.monotonic()
    again = run.recover(lost, gone)
    run.finish(gone)
    assert again < AGAIN_SECONDS


def cut_a_link(cluster: Cluster, run: Run) -> None:
    """For less than a lease."""
    host = run.host("inference-0")
    cluster.bed.cut(host)
    pause(20)
    cluster.bed.restore(host)


def slow_the_store(cluster: Cluster, run: Run) -> None:
    cluster.bed.slow("s3", delay_ms=50)


@pytest.mark.slow("a run of a minute or two")
@pytest.mark.parametrize(
    ("cluster", "disturb"),
    [(OnStarters, slow_the_store), *((kind, cut_a_link) for kind in SYSTEMS)],
    indirect=["cluster"],
)
def test_a_run_goes_on(cluster: Cluster, disturb: Callable[[Cluster, Run], None]) -> None:
    run = Run(cluster)
    begin = time.monotonic()
    disturb(cluster, run)
    run.finish(begin)


@pytest.mark.slow("a run of a minute, and a lease that ends")
@slurm_and_ray
def test_services_end_when_the_head_vanishes_and_a_new_start_goes_on(cluster: Cluster) -> None:
    Run(cluster)
    cluster.bed[HEAD].kill()
    gone = time.monotonic()
    cluster.bed[HEAD].start()
    cluster.admit_head()
    before = [services(node) for node in cluster.nodes]
    run = Run(cluster, line=" done (")
    print(
        f"{sum(before)} processes of services are left; an iteration is finished after {time.monotonic() - gone:.0f} s"
    )
    run.finish(gone)
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")


class TwoHeads(OnStarters):
    names = Cluster.names


@pytest.mark.slow("a run of a minute or two, and a link that is cut for as long")
@pytest.mark.parametrize("cluster", [TwoHeads], indirect=True)
@pytest.mark.parametrize("noticed", [True, False], ids=["starting again", "waiting"])
def test_a_flow_that_was_cut_off_leaves_the_run_to_a_later_start(cluster: Cluster, noticed: bool) -> None:
    """Whether it has found the store away and wants to start again, or still waits for answers."""
    first = Run(cluster)
    cluster.bed.cut(HEAD)
    cut = time.monotonic()
    if noticed:
        first.wait_for("Trying again", cut, limit=3 * LIMIT)  # requests to the store are retried for three minutes
    cluster.head = CONTROL
    second = Run(cluster, line=" done (")
    cluster.bed.restore(HEAD)
    back = time.monotonic()
    print(f"cut off for {back - cut:.0f} s")
    ended = first.wait_for("'r' has been started again since", back)
    assert first.process.wait() == 1, first.printed
    print(f"the first start ends {ended - back:.0f} s after it is back")
    second.finish(back)
    owners = [row["owner"] for row in query(cluster, "select owner from commits order by iteration")]
    assert owners == sorted(owners) and set(owners) == {1, 2}
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")
