"""Whole runs whose services are on machines that share nothing but the store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from waiting import wait_until

from machines.bed import NETWORK, ROOT, Machine, Machines, Process, first_line
from machines.starter import NODES, PORT

STARTER = str(ROOT / "tests" / "machines" / "starter.py")
SMALL = ("model.warm_start=", "model.scratch={}", "schedule.iterations=4", "evaluation.every=4")
THERE = ("launcher.type=machines.starter:Starters", f"launcher.network={NETWORK}.0/24")


class Cluster:
    """Two machines that start tasks, a store, and a head on which `arealflow` runs."""

    def __init__(self, bed: Machines) -> None:
        self.bed = bed
        self.nodes = [bed["node1"], bed["node2"]]
        for node in self.nodes:
            self.join(node)

    def join(self, node: Machine) -> None:
        path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        first_line(
            node.popen([sys.executable, STARTER, node.address], self.bed.s3 | path, stdout=subprocess.PIPE, text=True)
        )

    @property
    def environment(self) -> dict[str, str]:
        own = {NODES: ",".join(node.address for node in self.nodes), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        return self.bed.s3 | own | {"AREALFLOW_HOME": "/tmp/home", "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> Process:
        command = [sys.executable, "-c", "from flows.cli.main import main; main()", *arguments]
        return self.bed["head"].popen(
            command, self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def arealflow(self, *arguments: str) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return str(output)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Machines("head", "node1", "node2", s3=True) as bed:
        yield Cluster(bed)


def wait_for(process: Process, line: str) -> list[str]:
    """What the process prints up to this line. Fails if it ends before."""
    seen = []
    for printed in process.stdout:
        seen.append(printed)
        if line in printed:
            return seen
    raise AssertionError("".join(seen))


def test_a_run_on_three_machines_computes_what_one_machine_does(cluster: Cluster) -> None:
    more = ("inference.servers=2", "rollout.workers=2", "trainer.backend=fsdp2", "trainer.ranks=2")
    cluster.arealflow("run", "quickstart", "run=here", "launcher.type=local", *more, *SMALL)
    cluster.arealflow("run", "quickstart", "run=there", *THERE, *more, "trainer.nodes=2", *SMALL)
    assert "no difference" in cluster.arealflow("diff", "here", "there")
    assert "sound" in cluster.arealflow("audit", "there")


LONG = (*SMALL[:2], "schedule.iterations=60", "evaluation.every=60")
ASYNCHRONOUS = ("quickstart-async", *THERE, "inference.servers=2", "rollout.workers=2", *LONG)


def check_complete(cluster: Cluster, run: str) -> None:
    """Every group was trained on once, none is too old, and what is stored is sound."""
    found = cluster.arealflow("sql", run, "select count(*) n, count(distinct group_id) d from groups", "--json")
    [row] = json.loads(found)
    assert row["n"] == row["d"] == 60 * 32
    assert f"{run}: sound" in cluster.arealflow("audit", run)


@pytest.mark.slow("a run of a minute, in which a lease ends")
@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_run_goes_on_after_a_machine_has_vanished(cluster: Cluster, lost: str) -> None:
    process = cluster.start("run", *ASYNCHRONOUS, "run=r")
    wait_for(process, "iteration 5 done")
    cluster.bed[lost].kill()
    gone = time.monotonic()
    before = wait_for(process, "starting it again")
    after = wait_for(process, "iteration 30 done")
    print(f"iteration 30 {time.monotonic() - gone:.0f} s after {lost} vanished")
    output, _ = process.communicate()
    assert process.returncode == 0, "".join([*before, *after]) + str(output)
    check_complete(cluster, "r")


@pytest.mark.slow("a run of a minute, in which a link is cut for 20 s")
def test_a_run_goes_on_after_a_link_was_cut_for_a_while(cluster: Cluster) -> None:
    process = cluster.start("run", *ASYNCHRONOUS, "run=r")
    wait_for(process, "iteration 5 done")
    cluster.bed.cut("node1")
    time.sleep(20)  # shorter than a lease
    cluster.bed.restore("node1")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    check_complete(cluster, "r")


@pytest.mark.slow("a run of a minute, and a lease that ends")
def test_services_end_when_the_head_vanishes_and_a_new_start_goes_on(cluster: Cluster) -> None:
    process = cluster.start("run", *ASYNCHRONOUS, "run=r")
    wait_for(process, "iteration 5 done")
    cluster.bed["head"].kill()
    cluster.bed["head"].start()
    cluster.arealflow("run", *ASYNCHRONOUS, "run=r")
    check_complete(cluster, "r")
    count = ["sh", "-c", "ls /proc | grep -c '^[0-9]' "]
    wait_until(lambda: all(int(node.run(count).stdout) < 12 for node in cluster.nodes))


#: `ADDRESS:PORT …`: what a stranger gets from each, by plain HTTP and by TLS: a status, or the error.
STRANGER = """
import http.client, ssl, sys
trusting = ssl._create_unverified_context()
for where in sys.argv[1:]:
    plain, secret = http.client.HTTPConnection(where, timeout=5), http.client.HTTPSConnection(where, context=trusting)
    for connection in (plain, secret):
        try:
            connection.request("GET", "/health")
            print(where, connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            print(where, type(error).__name__)
"""


def open_ports(machine: Machine) -> list[str]:
    """Where programs of the machine listen for others."""
    listed = machine.run(["ss", "-Hltn"]).stdout.splitlines()
    places = [line.split()[3] for line in listed]
    assert not [place for place in places if place.startswith(("0.0.0.0", "*", "[::]"))], "on every interface"
    return [place for place in places if not place.startswith(("127.", "[::1]")) and not place.endswith(f":{PORT}")]


def test_a_stranger_on_the_network_gets_nothing_from_services(cluster: Cluster) -> None:
    process = cluster.start("run", *ASYNCHRONOUS, "run=r")
    wait_for(process, "iteration 1 done")
    found = [place for node in cluster.nodes for place in open_ports(node)]
    assert len(found) == 10, "five services and their agents"
    assert not open_ports(cluster.bed["head"])
    answers = cluster.bed["head"].run([sys.executable, "-c", STRANGER, *found]).stdout.splitlines()
    print(*answers, sep="\n")
    assert len(answers) == 20
    assert {line.split()[1] for line in answers} <= {"401", "RemoteDisconnected", "SSLError", "ConnectionResetError"}
    assert sum(line.endswith("401") for line in answers) == 5, "services ask for the token; agents for a certificate"
    process.terminate()
    process.wait()
