"""Runs whose services are on machines that share nothing but the store, and the cluster systems that run them."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from threading import Thread
from typing import Any, Final

import pytest
from waiting import LIMIT, wait_until

from machines.bed import Machine, Process
from machines.clusters import Cluster, OnRay, OnSlurm, OnStarters

UNTRAINED: Final = ("model.warm_start=", "model.scratch={}")
ITERATIONS: Final = 40
ASYNCHRONOUS: Final = (
    *("quickstart-async", "run=r", "inference.servers=2", "rollout.workers=2", *UNTRAINED),
    *(f"schedule.iterations={ITERATIONS}", f"evaluation.every={ITERATIONS}"),
)

#: Those that users have. A fault that does not depend on the cluster system is tested on the tests' own alone.
SYSTEMS: Final = (OnSlurm, OnRay)
starters = pytest.param(OnStarters, id="starter")
through_slurm = pytest.param(OnSlurm, id="slurm", marks=pytest.mark.slow("Slurm's daemons, and a run of a minute"))
through_ray = pytest.param(OnRay, id="ray", marks=pytest.mark.slow("Ray's daemons, and a run of a minute"))
each_system = pytest.mark.parametrize("cluster", [starters, through_slurm, through_ray], indirect=True)
slurm_and_ray = pytest.mark.parametrize("cluster", [through_slurm, through_ray], indirect=True)


class Lines:
    """What a process has printed when."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait_for(self, line: str, since: float = 0.0, limit: float = LIMIT) -> float:
        """When it printed such a line. Fails if it ends before."""
        try:
            wait_until(lambda: self.times(line, since) or not self._reader.is_alive(), line, limit)
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


class Run(Lines):
    """A run that goes on, and what it has printed when."""

    def __init__(self, cluster: Cluster, *more: str, line: str = "iteration 5 done") -> None:
        self.cluster = cluster
        super().__init__(cluster.start(*cluster.run(*ASYNCHRONOUS, *more)))
        self.wait_for(line)

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


def services(machine: Machine) -> int:
    """How many agents and services run on a machine."""
    shown = machine.run(["ps", "-eo", "args"]).stdout.splitlines()
    return sum("-m areal_tasks." in line for line in shown)
