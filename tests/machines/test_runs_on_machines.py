"""Whole runs whose services are on machines that share nothing but the store."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import Final

import pytest
from waiting import LIMIT, wait_until

from areal_tasks.launchers.cluster import PREEMPTED
from machines.bed import NETWORK, ROOT, Machine, Process
from machines.clusters import CPUS, HEAD, KEYS, NODES, Cluster, OnRay, OnSlurm
from machines.runs import (
    ASYNCHRONOUS,
    UNTRAINED,
    Run,
    check_complete,
    each_system,
    query,
    services,
    slurm_and_ray,
    through_ray,
    through_slurm,
)
from machines.starter import PORT

TRUSTED: Final = "launcher.trust_network=true"
ALLOCATED: Final = str(ROOT / "deployments" / "slurm" / "flow.sbatch")
#: Every iteration moves the weights.
SMALL: Final = (*UNTRAINED, "reward.verifier=stage_reward:digits", "schedule.iterations=4", "evaluation.every=4")
#: A copy of the weights on each machine, split over its two ranks; and DeepSpeed, which splits all over both machines.
SPLITS: Final = {
    "replicas": ("trainer.backend=fsdp2", "trainer.ranks=4", "trainer.replicas=2"),
    "zero-3": ("trainer.backend=deepspeed", "trainer.ranks=2", "trainer.zero_stage=3"),
}


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
    print(cluster.arealflow(*cluster.run("quickstart", "run=there", "trainer.nodes=2", TRUSTED, *own)))
    assert "no difference" in cluster.arealflow("diff", "here", "there")
    assert "sound" in cluster.arealflow("audit", "there")


@each_system
def test_a_run_on_machines_computes_what_one_machine_does(cluster: Cluster) -> None:
    compare_with_one_machine(cluster, "trainer.backend=fsdp2", "trainer.ranks=2")


@pytest.mark.slow("other ways to split a trainer over two machines: two runs each")
@pytest.mark.parametrize("trainer", SPLITS.values(), ids=SPLITS.keys())
def test_every_trainer_computes_over_two_machines_what_it_does_on_one(cluster: Cluster, trainer: Sequence[str]) -> None:
    compare_with_one_machine(cluster, *trainer)


@pytest.mark.slow("a run of some minutes")
@slurm_and_ray
def test_services_on_other_nodes_join_and_leave_a_run_that_goes_on(cluster: Cluster) -> None:
    """The trainer spreads over two nodes at a checkpoint, a server and a worker join; then all of them leave again."""
    fewer = ("inference.servers=1", "rollout.workers=1", "schedule.iterations=2000")
    trainer = ("trainer.backend=fsdp2", "trainer.recover_within_seconds=3600", "launcher.resources.trainer.cpus=2")
    run = Run(cluster, *fewer, *trainer)
    before = sum(services(node) for node in cluster.nodes)

    asked = run.change("trainer.ranks=2", "trainer.nodes=2", TRUSTED)
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


@pytest.mark.parametrize("cluster", [through_ray], indirect=True)
def test_a_run_goes_on_after_ray_was_told_to_drain_a_node(cluster: OnRay) -> None:
    """Its services start elsewhere before the node goes, which is no failure of theirs."""
    run = Run(cluster, "launcher.restarts=0")
    host = run.host("inference-0")
    begin = time.monotonic()
    cluster.drain(host)
    run.recover(host, begin)
    wait_until(lambda: not services(cluster.bed[host]), "the end of the services there")
    cluster.bed[host].kill()
    run.finish(begin)
    ends = re.findall(r"service \S+ ended with (\S+);", run.printed)
    assert len(ends) >= 2 and set(ends) == {str(PREEMPTED)}


@pytest.mark.parametrize("cluster", [through_slurm], indirect=True)
@pytest.mark.parametrize("end", ["requeue {job}", "update jobid={job} timelimit=2"], ids=["requeued", "time limit"])
def test_a_run_goes_on_after_slurm_has_ended_a_job(cluster: OnSlurm, end: str) -> None:
    run, service = Run(cluster, "launcher.slurm.options=[--requeue]"), "trainer"
    [job] = cluster.jobs(service)
    begin = time.monotonic()
    cluster.slurm.run("scontrol", *end.format(job=job).split())
    again = run.wait_for(f"service {service} starts on", begin)
    print(f"{service} starts again after {again - begin:.0f} s")
    run.finish(begin)


@pytest.mark.parametrize("cluster", [through_slurm], indirect=True)
def test_a_run_in_an_allocation_goes_on_after_its_time_limit(cluster: OnSlurm) -> None:
    """By the script of the guide, which ends the flow in time and has Slurm begin the job again."""
    own = {"PATH": cluster.nodes[0].environment["PATH"], "PYTHONPATH": str(ROOT), "AREALFLOW_HOME": "/tmp/home"}
    cluster.add_settings(own | {"OMP_NUM_THREADS": "1"} | cluster.slurm.environment)
    more = (f"launcher.network={NETWORK}.0/24", "schedule.iterations=100", "evaluation.every=100")
    whole_nodes = (f"--nodes={len(NODES)}", f"--cpus-per-task={CPUS}", "--time=60", "--output=/root/printed")
    job = cluster.slurm.run("sbatch", "--parsable", *whole_nodes, ALLOCATED, KEYS, *ASYNCHRONOUS, *more)

    def printed() -> str:
        files = [node.path("/root/printed") for node in cluster.nodes]
        return "".join(file.read_text() for file in files if file.exists())

    def ended() -> bool:
        return "JobState=COMPLETED" in cluster.slurm.run("scontrol", "show", "job", job)

    wait_until(lambda: "iteration 5 done" in printed(), "iteration 5")
    cluster.slurm.run("scontrol", "update", f"jobid={job}", "timelimit=3")
    begin = time.monotonic()
    wait_until(lambda: "Restarts=1" in cluster.slurm.run("scontrol", "show", "job", job), "the job's second start")
    cluster.slurm.run("scontrol", "update", f"jobid={job}", "timelimit=60")
    print(f"the job is requeued after {time.monotonic() - begin:.0f} s")
    wait_until(ended, "the end of the run", 2 * LIMIT)
    assert check_complete(cluster) == 100
    assert [row["owner"] for row in query(cluster, "select distinct owner from commits order by 1")] == [1, 2]
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")


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
