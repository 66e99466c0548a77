"""Whole runs whose services are on machines that share nothing but the store."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Thread
from typing import Any, Final

import pytest
from waiting import wait_until

from areal_tasks.launchers.cluster import PREEMPTED
from machines.bed import Machine, Machines, Process
from machines.clusters import HEAD, Cluster, OnRay, OnSlurm, OnStarters, pause
from machines.starter import PORT

UNTRAINED: Final = ("model.warm_start=", "model.scratch={}")
#: Every iteration moves the weights.
SMALL: Final = (*UNTRAINED, "reward.verifier=stage_reward:digits", "schedule.iterations=4", "evaluation.every=4")
ITERATIONS: Final = 40
ASYNCHRONOUS: Final = (
    *("quickstart-async", "run=r", "inference.servers=2", "rollout.workers=2", *UNTRAINED),
    *(f"schedule.iterations={ITERATIONS}", f"evaluation.every={ITERATIONS}"),
)
#: A copy of the weights on each machine, split over its two ranks; and DeepSpeed, which splits all over both machines.
SPLITS: Final = {
    "replicas": ("trainer.backend=fsdp2", "trainer.ranks=4", "trainer.replicas=2"),
    "zero-3": ("trainer.backend=deepspeed", "trainer.ranks=2", "trainer.zero_stage=3"),
}
#: Until generation runs again after a node is lost, where another node is free.
AGAIN_SECONDS: Final = 90.0

#: Where each run takes a minute or more, a fault that does not depend on the cluster system is tested on one of them.
SYSTEMS: Final = (OnStarters, OnSlurm, OnRay)
starters = pytest.param(OnStarters, id="starter")
through_slurm = pytest.param(OnSlurm, id="slurm", marks=pytest.mark.slow("Slurm's daemons, and a run of a minute"))
through_ray = pytest.param(OnRay, id="ray", marks=pytest.mark.slow("Ray's daemons, and a run of a minute"))
each_system = pytest.mark.parametrize("cluster", [starters, through_slurm, through_ray], indirect=True)
slurm_and_ray = pytest.mark.parametrize("cluster", [through_slurm, through_ray], indirect=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kind: type[Cluster] = getattr(request, "param", OnStarters)
    with Machines(*kind.names, s3=True) as bed:
        yield kind(bed)


class Run:
    """A run that goes on, and what it has printed when."""

    def __init__(self, cluster: Cluster, *more: str, line: str = "iteration 5 done") -> None:
        self.cluster = cluster
        self.process = cluster.start(*cluster.run(*ASYNCHRONOUS, *more))
        self.lines: list[tuple[float, str]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(line)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait_for(self, line: str, since: float = 0.0) -> float:
        """When the run printed such a line. Fails if it ends before."""
        try:
            wait_until(lambda: self.times(line, since) or not self._reader.is_alive(), line)
        finally:
            found = self.times(line, since)
            if not found:
                print(self.printed)
        assert found, f"it ended without {line!r}"
        return found[0]

    def times(self, line: str, since: float = 0.0) -> list[float]:
        return [when for when, printed in list(self.lines) if line in printed and when > since]

    @property
    def printed(self) -> str:
        return "".join(line for _, line in self.lines)

    def host(self, service: str) -> str:
        """The machine on which a service runs."""
        return re.findall(rf"service {service} starts on (\S+)", self.printed)[-1]

    def change(self, *fields: str) -> float:
        """Ask for a change of the run that goes on; when that was."""
        asked = time.monotonic()
        print(self.cluster.arealflow("set", "r", *fields).strip())
        return asked

    def recover(self, lost: str, since: float) -> float:
        """A service of the lost node starts elsewhere; after how many seconds an iteration was finished."""
        ended = self.wait_for("restarting it", since)
        again = self.wait_for("starts on", ended)
        closed = self.wait_for(" done (", again)
        print(f"{lost}: found after {ended - since:.0f} s, a service starts elsewhere after {again - since:.0f} s,")
        print(f"an iteration is finished after {closed - since:.0f} s")
        return closed - since

    def finish(self, since: float) -> None:
        """It ends well, and is complete. Prints the longest time without a finished iteration since then."""
        self._reader.join()
        assert self.process.wait() == 0, self.printed
        done = [since, *self.times(" done (", since)]
        longest = max(after - before for before, after in pairwise(done))
        print(f"no iteration was finished for {longest:.0f} s at most; the end after {done[-1] - since:.0f} s")
        assert check_complete(self.cluster) == ITERATIONS


def query(cluster: Cluster, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(cluster.arealflow("sql", "r", sql, "--json"))
    return rows


def check_complete(cluster: Cluster) -> int:
    """Every group was trained on once, none is too old, and what is stored is sound. The number of iterations."""
    counted = "select count(*) n, count(distinct group_id) d, count(distinct iteration) k from groups"
    [row] = query(cluster, counted)
    assert row["n"] == row["d"] == row["k"] * 32
    assert "r: sound" in cluster.arealflow("audit", "r")
    return int(row["k"])


def wait_for(process: Process, line: str) -> None:
    """Until the process prints this line. Fails if it ends before."""
    seen = []
    for printed in process.stdout:
        seen.append(printed)
        if line in printed:
            return
    raise AssertionError("".join(seen))


def compare_with_one_machine(cluster: Cluster, *more: str) -> None:
    """Trainer over two machines; six services on three nodes."""
    own = ("inference.servers=2", "rollout.workers=2", *more, *SMALL)
    cluster.arealflow("run", "quickstart", "run=here", "launcher.type=local", *own)
    print(cluster.arealflow(*cluster.run("quickstart", "run=there", "trainer.nodes=2", *own)))
    assert "no difference" in cluster.arealflow("diff", "here", "there")
    assert "sound" in cluster.arealflow("audit", "there")


@each_system
def test_a_run_on_machines_computes_what_one_machine_does(cluster: Cluster) -> None:
    compare_with_one_machine(cluster, "trainer.backend=fsdp2", "trainer.ranks=2")


@pytest.mark.slow("other ways to split a trainer over two machines: two runs each")
@pytest.mark.parametrize("trainer", SPLITS.values(), ids=SPLITS.keys())
def test_every_trainer_computes_over_two_machines_what_it_does_on_one(cluster: Cluster, trainer: Sequence[str]) -> None:
    compare_with_one_machine(cluster, *trainer)


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


@pytest.mark.slow("a run of some minutes")
@slurm_and_ray
def test_services_on_other_nodes_join_and_leave_a_run_that_goes_on(cluster: Cluster) -> None:
    """The trainer spreads over two nodes at a checkpoint, a server and a worker join; then all of them leave again."""
    fewer = ("inference.servers=1", "rollout.workers=1", "schedule.iterations=2000")
    trainer = ("trainer.backend=fsdp2", "trainer.recover_within_seconds=3600", "launcher.resources.trainer.cpus=2")
    run = Run(cluster, *fewer, *trainer)
    before = sum(services(node) for node in cluster.nodes)

    asked = run.change("trainer.ranks=2", "trainer.nodes=2")
    resized = run.wait_for("service trainer-1 starts on", asked)
    trained = run.wait_for(" done (", run.wait_for("restoring version", asked))
    assert run.host("trainer") != run.host("trainer-1")
    print(f"asked for two machines, the trainer starts there after {resized - asked:.0f} s, and has trained after")
    print(f"{trained - asked:.0f} s")

    asked = run.change("inference.servers=2", "rollout.workers=2")
    joined = max(run.wait_for(f"service {name}-1 starts on", asked) for name in ("inference", "rollout"))
    wait_until(lambda: len(query(cluster, "select distinct server from samples")) == 2, "samples of the new server")
    print(f"a server and a worker start after {joined - asked:.0f} s, the server's samples are trained on")
    print(f"{time.monotonic() - asked:.0f} s after they were asked for")
    names = ("trainer", "trainer-1", "inference-0", "inference-1", "rollout-0", "rollout-1")
    assert {run.host(name) for name in names} == {node.name for node in cluster.nodes}

    asked = run.change("inference.servers=1", "rollout.workers=1", "trainer.ranks=1", "trainer.nodes=1")
    left = max(run.wait_for(f"{name}-1 leaves the run", asked) for name in ("inference", "rollout"))
    trained = run.wait_for(" done (", run.wait_for("restoring version", asked))
    print(f"they leave after {left - asked:.0f} s, one trainer has trained after {trained - asked:.0f} s")
    wait_until(lambda: sum(services(node) for node in cluster.nodes) == before, "the end of those that leave")
    assert "retrained" not in run.printed, "each trainer begins with the checkpoint of the one before"
    run.process.terminate()
    run.process.wait()
    print(f"{check_complete(cluster)} iterations")


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
@each_system
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


def services(machine: Machine) -> int:
    """How many agents and services run on a machine."""
    shown = machine.run(["ps", "-eo", "args"]).stdout.splitlines()
    return sum("-m areal_tasks." in line for line in shown)


@pytest.mark.slow("a run of a minute or two")
@slurm_and_ray
def test_a_run_goes_on_after_the_controller_was_away(cluster: OnSlurm | OnRay) -> None:
    run = Run(cluster)
    begin = time.monotonic()
    cluster.restart_controller(seconds=10)
    run.finish(begin)


@slurm_and_ray
def test_a_run_goes_on_after_the_cluster_has_taken_a_node(cluster: OnSlurm | OnRay) -> None:
    run = Run(cluster)
    host = run.host("trainer")
    begin = time.monotonic()
    cluster.take(host)
    run.recover(host, begin)
    run.finish(begin)
    if isinstance(cluster, OnSlurm):
        ends = re.findall(r"service \S+ ended with (\S+);", run.printed)
        assert set(ends) == {str(PREEMPTED)}, "no failure of any service"


@pytest.mark.parametrize("cluster", [through_slurm], indirect=True)
def test_a_run_goes_on_after_slurm_has_requeued_a_job(cluster: OnSlurm) -> None:
    run, service = Run(cluster, "launcher.slurm.options=[--requeue]"), "trainer"
    [job] = cluster.jobs(service)
    begin = time.monotonic()
    cluster.slurm.run("scontrol", "requeue", job)
    again = run.wait_for(f"service {service} starts on", begin)
    print(f"{service} starts {again - begin:.0f} s after the job was requeued")
    run.finish(begin)


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
    process = cluster.start(*cluster.run(*ASYNCHRONOUS))
    wait_for(process, "iteration 1 done")
    found = [place for node in cluster.nodes for place in open_ports(node)]
    assert len(found) == 12, "six services and their agents"
    assert not open_ports(cluster.bed[HEAD])
    answers = cluster.bed[HEAD].run([sys.executable, "-c", STRANGER, *found]).stdout.splitlines()
    print(*answers, sep="\n")
    assert len(answers) == 24
    assert {line.split()[1] for line in answers} <= {"401", "RemoteDisconnected", "SSLError", "ConnectionResetError"}
    assert sum(line.endswith("401") for line in answers) == 6, "services ask for the token; agents for a certificate"
    process.terminate()
    process.wait()
