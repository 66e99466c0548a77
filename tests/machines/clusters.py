"""Cluster systems on which whole runs are tested: the tests' own starter, Slurm and Ray.

`arealflow` runs on `head`, services run on the nodes, and the controller of Slurm or Ray is on `control`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from waiting import wait_until
from warm_processes import FORKED

from machines.bed import NETWORK, ROOT, S3, Machine, Machines, Process, first_line
from machines.forking import PLACE, serve_on
from machines.slurm import start_slurm
from machines.starter import NODES as NAMES_OF_NODES

STARTER: Final = str(ROOT / "tests" / "machines" / "starter.py")
WORKER: Final = str(ROOT / "deployments" / "ray" / "worker.sh")
HEAD: Final = "head"
CONTROL: Final = "control"
NODES: Final = ("node1", "node2", "node3")
#: Two services on each of three nodes; without one of them, six services find room on the others.
CPUS: Final = 3
#: Jobs of the partition `urgent` have others ended.
PREEMPTION: Final = (
    "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL\n"
    f"PartitionName=urgent Nodes={','.join(NODES)} PriorityTier=10 State=UP\n"
)
KEYS: Final = "/root/keys"  # on a disk that survives
#: How the head finds lost nodes, in less than the minute that is Ray's default (docs/guides/ray.md).
HEALTH: Final = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
#: `ADDRESS NODE OPTION …`: `ray drain-node` wants the node's ID, for which Ray's own command needs a dashboard.
DRAIN: Final = """
import subprocess, sys, ray
ray.init(address := sys.argv[1])
[node] = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeManagerHostname"] == sys.argv[2]]
command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={address}", f"--node-id={node}"]
subprocess.run([*command, *sys.argv[3:]], check=True)
"""


class Cluster:
    """Nodes that start tasks, a store, and a head on which `arealflow` runs."""

    names: tuple[str, ...] = (CONTROL, HEAD, *NODES)
    place: tuple[str, ...]  # of the recipe
    python: tuple[str, ...] = (sys.executable, "-m")  # runs a module on the head
    head: str = HEAD  # the machine on which `arealflow` runs

    def __init__(self, bed: Machines) -> None:
        self.bed = bed
        self.environment: dict[str, str] = {}

    @property
    def nodes(self) -> list[Machine]:
        return [self.bed[name] for name in NODES if self.bed[name].pid]

    def admit_head(self) -> None:
        """Make the head a machine of the cluster."""

    def prefect_worker(self) -> tuple[str, ...]:
        """The command by which the head becomes the machine of a Prefect worker."""
        return (sys.executable, "-P", "-m", "flows.worker")

    def start(self, *arguments: str) -> Process:
        return self.popen(*self.python, "arealflow.command", *arguments)

    def popen(self, *command: str) -> Process:
        """Start a command on the head as a user of the cluster and the store."""
        own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "AREALFLOW_HOME": "/tmp/home", "OMP_NUM_THREADS": "1"}
        return self.bed[self.head].popen(
            command,
            self.bed.s3 | own | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def arealflow(self, *arguments: str) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return str(output)

    def run(self, recipe: str, *more: str) -> tuple[str, ...]:
        """Arguments that run a recipe on the nodes."""
        return ("run", recipe, f"launcher.network={NETWORK}.0/24", *self.place, *more)


class OnStarters(Cluster):
    """The tests' own cluster system, which has no controller, and whose processes are forked."""

    names = (HEAD, *NODES)
    place = ("launcher.type=machines.starter:Starters",)
    python = FORKED

    def __init__(self, bed: Machines) -> None:
        super().__init__(bed)
        for machine in bed:
            if machine.name != S3:
                serve_on(machine)
        self.environment = {NAMES_OF_NODES: ",".join(node.address for node in self.nodes), **PLACE}
        for node in self.nodes:
            path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PLACE}
            first_line(
                node.popen([sys.executable, STARTER, node.address], bed.s3 | path, stdout=subprocess.PIPE, text=True)
            )


class OnSlurm(Cluster):
    """The head is a login node. Slurm passes no keys on: they are on each node, as a user would keep them."""

    place = ("launcher.type=slurm", f"launcher.slurm.setup=set -a; . {KEYS}")

    def __init__(self, bed: Machines) -> None:
        super().__init__(bed)
        self.slurm = start_slurm(bed, NODES, cpus=CPUS, more=PREEMPTION)
        self.environment = self.slurm.environment
        self.admit_head()
        self.add_settings(bed.s3)

    def add_settings(self, values: Mapping[str, str]) -> None:
        """To the file that each node reads."""
        for node in self.nodes:
            with node.path(KEYS).open("a") as file:
                file.writelines(f"{name}={value}\n" for name, value in values.items())

    def admit_head(self) -> None:
        self.slurm.admit(self.bed[HEAD])

    def restart_controller(self, seconds: float) -> None:
        controller = self.slurm.daemons[0]
        controller.terminate()
        controller.wait()
        pause(seconds)
        self.slurm.begin(self.slurm.head, "slurmctld")
        wait_until(self.slurm.answers, "the controller")

    def take(self, name: str) -> None:
        """A job that is more urgent gets a whole node: Slurm asks those there to end, and kills them after KillWait."""
        self.slurm.run("sbatch", "--partition=urgent", f"--nodelist={name}", "--exclusive", "--wrap=sleep 1000")

    def jobs(self, service: str) -> list[str]:
        """The numbers of the service's jobs that run."""
        listed = self.slurm.run("squeue", "--noheader", "--states=RUNNING", "--Format=JobID:|,Name:200").splitlines()
        return [line.partition("|")[0] for line in listed if f"-{service}-" in line]


class OnRay(Cluster):
    """The head is a node of the cluster that runs no task, for a flow's machine must be one."""

    place = ("launcher.type=ray",)
    options: tuple[str, ...] = ()  # further ones of `ray start`

    def __init__(self, bed: Machines) -> None:
        super().__init__(bed)
        self.address = f"{bed[CONTROL].address}:6379"
        self.environment = {"RAY_ADDRESS": self.address}
        self.begin()

    def begin(self) -> None:
        """Ray's head, and all machines that are on as its nodes."""
        start_ray(self.bed[CONTROL], "--head", "--num-cpus=0", "--include-dashboard=false", *self.options)
        self.admit_head()
        for node in self.nodes:
            start_ray(node, f"--address={self.address}", f"--num-cpus={CPUS}", *self.options, **self.bed.s3)

    def admit_head(self) -> None:
        start_ray(self.bed[HEAD], f"--address={self.address}", "--num-cpus=0", *self.options)

    def prefect_worker(self) -> tuple[str, ...]:
        self.take(HEAD)  # the script joins again
        return (WORKER, *own_options(self.bed[HEAD]))

    def take(self, name: str) -> None:
        """A node leaves the cluster, as when a spot machine has been given notice."""
        self.bed[name].run([sys.executable, "-m", "ray.scripts.scripts", "stop"])

    def drain(self, name: str) -> None:
        """Ray is informed that a node will be gone in 5 minutes, as by the notice that a spot machine gets."""
        asked = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=300"]
        self.bed[CONTROL].run([sys.executable, "-c", DRAIN, self.address, name, *asked])

    def restart_controller(self, seconds: float) -> None:
        """Ray's head vanishes and comes back empty; `ray start` is called again on each node."""
        self.bed[CONTROL].kill()
        pause(seconds)
        self.bed[CONTROL].start()
        for machine in (self.bed[HEAD], *self.nodes):
            machine.run([sys.executable, "-m", "ray.scripts.scripts", "stop"], check=False)
        self.begin()


def pause(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


def start_ray(machine: Machine, *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *own_options(machine)]
    machine.run(command, HEALTH | environment)


def own_options(machine: Machine) -> tuple[str, ...]:
    """The options that `ray start` needs on a machine of the test bed."""
    return (f"--node-ip-address={machine.address}", "--object-store-memory=80000000", "--disable-usage-stats")
