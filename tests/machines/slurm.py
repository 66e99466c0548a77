"""A real Slurm on machines of the test bed: `munged` on each, `slurmctld` on the first, `slurmd` on the others.

Each node offers as many cores as the test wants, whatever this machine has. Nothing is kept in cgroups.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, Final

import pytest
from waiting import wait_until

from machines.bed import Machine, Machines, Process

FOLDER: Final = "/run/slurm"
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIGURATION: Final = """
ClusterName=bed
SlurmctldHost={head}
AuthInfo=socket=/run/munge.socket,cred_expire=5
SlurmUser=root
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout={patience}
SlurmctldTimeout=5
KillWait=2
MessageTimeout=10
SrunPortRange=61000-63000
ReturnToService=2
MpiDefault=none
"""


class Slurm:
    """A cluster that runs. `environment` is what its commands need, on the first machine as on the others."""

    def __init__(self, bed: Machines, head: str, nodes: Sequence[str]) -> None:
        self.bed = bed
        self.head = bed[head]
        self.nodes = nodes
        self.environment = {"SLURM_CONF": f"{FOLDER}/slurm.conf"}
        self.daemons: list[Process] = []
        self.configuration = ""
        self.key = secrets.token_bytes(128)

    def run(self, *command: str, **options: Any) -> str:
        """What a command prints on the first machine."""
        return self.head.run(command, self.environment, **options).stdout.strip()

    def admit(self, machine: Machine) -> None:
        """Let Slurm's commands work on a machine: its configuration, and munge's daemon."""
        machine.run(["mkdir", "-p", f"{FOLDER}/state", f"{FOLDER}/spool"])
        machine.path(f"{FOLDER}/slurm.conf").write_text(self.configuration)
        key = machine.path("/run/munge.key")
        if not key.exists():
            key.write_bytes(self.key)
            key.chmod(0o600)
            machine.run(
                [
                    "munged",
                    "--force",
                    *(f"--{what}-file=/run/munge.{what}" for what in ("key", "pid", "seed", "log")),
                    "--socket=/run/munge.socket",
                ]
            )

    def begin(self, machine: Machine, daemon: str) -> None:
        """Start a daemon of Slurm."""
        self.admit(machine)
        self.daemons.append(
            machine.popen([daemon, "-D"], self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )

    def idle(self) -> bool:
        """Whether all nodes can take jobs."""
        states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T", check=False).split()
        return states == ["idle"] * len(self.nodes)

    def answers(self) -> bool:
        """Whether the controller does."""
        return "UP" in self.run("scontrol", "ping", check=False)


def start_slurm(
    bed: Machines, nodes: Sequence[str], cpus: int = 8, memory_mb: int = 8192, patience: int = 5, more: str = ""
) -> Slurm:
    """A cluster of these nodes, with the partitions `main` (the default) and `short` (of one minute).

    A node that has been silent for `patience` seconds counts as lost. `more`: further lines of the configuration.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: {', '.join(missing)} (Debian: apt install slurm-wlm munge)")
    slurm = Slurm(bed, next(iter(bed)).name, nodes)
    slurm.configuration = CONFIGURATION.format(folder=FOLDER, head=slurm.head.name, patience=patience) + "".join(
        [
            more,
            *(f"NodeName={name} CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN\n" for name in nodes),
            f"PartitionName=main Default=YES Nodes={','.join(nodes)} MaxTime=INFINITE State=UP\n",
            f"PartitionName=short Nodes={','.join(nodes)} MaxTime=1 State=UP\n",
        ]
    )
    slurm.begin(slurm.head, "slurmctld")
    for name in nodes:
        slurm.begin(bed[name], "slurmd")
    wait_until(slurm.idle, "Slurm's nodes")
    return slurm
