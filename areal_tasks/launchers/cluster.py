"""What a cluster system does for a run: it runs tasks on machines that have the resources.

`remote` puts a node agent into each task. All else, such as the token, the service's end and its log, goes between the
flow and the agent, so a cluster system sees no secret and needs no network of ours.
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
    """What a task needs of one machine. `memory_mb` 0: not stated."""

    cpus: int = 1
    gpus: int = 0
    memory_mb: int = 0

    def __sub__(self, taken: Resources) -> Resources:
        return Resources(self.cpus - taken.cpus, self.gpus - taken.gpus, self.memory_mb - taken.memory_mb)


ANY: Final = Resources()
#: Exit code of what was on a machine that is lost.
LOST: Final = os.EX_UNAVAILABLE
#: Exit code of a task that the cluster has ended for reasons of its own, such as one of a higher priority.
TAKEN_BACK: Final = 79


class ClusterAway(Unavailable):
    """The cluster system does not answer: it may recover by itself. The message names the cause and the remedy."""


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster: what it has, and what of that is free. `state`: why it can take no task now, if so."""

    name: str
    total: Resources
    free: Resources
    state: str = ""


@dataclass(frozen=True)
class Task:
    """A command to run on a machine of the cluster.

    `name` is unique among all runs. `environment` holds no secret: cluster systems show it, and send it unencrypted.
    `output` is a file of this machine for what the command prints, where the cluster system can deliver that.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    resources: Resources
    output: Path


class Submitted(Protocol):
    """A task that the cluster has accepted. No method waits for the network."""

    def waiting(self) -> str:
        """Why it does not run, in the cluster system's words; empty once it runs, until the cluster takes it back."""
        ...

    def exit_code(self) -> int | None:
        """None while it waits or runs."""
        ...

    def cancel(self) -> None:
        """End it; returns when it has ended, or is certain to."""
        ...


class Cluster(Protocol):
    """A connection to a cluster that is already running. Made with the recipe's section `launcher`."""

    def submit(self, task: Task) -> Submitted:
        """Have the cluster run a task. Several threads may call this at once.

        Raises:
            ClusterAway: the cluster does not answer now.
            UserError: no machine of the cluster can ever run it, or the cluster refuses it; with the reason.
        """
        ...

    def close(self) -> None:
        """End all tasks that were submitted here."""
        ...


@runtime_checkable
class Listing(Protocol):
    """A cluster that can also list its machines, for `arealflow plan --placement`."""

    def machines(self) -> list[Machine]:
        """The machines that may run tasks of these settings.

        Raises:
            UserError: the cluster cannot be asked.
        """
        ...
