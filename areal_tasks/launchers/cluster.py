"""What a cluster system does for a run: it runs tasks on machines that have the resources.

`remote` puts a node agent into each task. The flow and the agent exchange everything else, such as the token, the log
and the end of the service, so that a cluster system sees no secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from areal_tasks.store.backend import Unavailable


@dataclass(frozen=True)
class Resources:
    """What a task needs on one machine. `memory_mb` 0: unspecified."""

    cpus: int = 1
    gpus: int = 0
    memory_mb: int = 0

    def __sub__(self, taken: Resources) -> Resources:
        return Resources(self.cpus - taken.cpus, self.gpus - taken.gpus, self.memory_mb - taken.memory_mb)


ANY: Final = Resources()
#: Exit code of a task whose machine was lost.
LOST: Final = os.EX_UNAVAILABLE
#: Exit code of a task that the cluster has preempted, for example for one of a higher priority.
PREEMPTED: Final = 79


class ClusterUnreachable(Unavailable):
    """The cluster system does not answer, and may recover by itself. The message names the cause and the remedy."""


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster: its total and free resources. `state`: why it accepts no task now; empty if it does."""

    name: str
    total: Resources
    free: Resources
    state: str = ""


@dataclass(frozen=True)
class Task:
    """A command to run on a machine of the cluster.

    `name` is unique among all runs. `environment` holds no secret: cluster systems show it, and send it unencrypted.
    `output` is a file of this machine for the command's output, if the cluster system can deliver it.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    resources: Resources
    output: Path


class Submitted(Protocol):
    """A task that the cluster has accepted. No method waits for the network."""

    def waiting(self) -> str:
        """Why it does not run, in the cluster system's words; empty while it runs."""

    def exit_code(self) -> int | None:
        """Its exit code; None while it waits or runs."""

    def cancel(self) -> None:
        """End it; returns when it has ended, or when its end is certain."""


class Cluster(Protocol):
    """A connection to a cluster that is already running. Made with the recipe's section `launcher`."""

    def submit(self, task: Task) -> Submitted:
        """Have the cluster run a task. Several threads may call this at once.

        Raises:
            ClusterUnreachable: the cluster does not answer now.
            UserError: no machine of the cluster can ever run it, or the cluster refuses it; with the reason.
        """

    def close(self) -> None:
        """End all tasks that were submitted here."""


@runtime_checkable
class Listing(Protocol):
    """A cluster that can also list its machines, for `arealflow plan --placement`."""

    def machines(self) -> list[Machine]:
        """The machines that may run tasks of these settings. UserError if the cluster cannot be asked."""
