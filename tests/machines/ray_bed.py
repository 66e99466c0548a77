"""A real Ray cluster, a head and two nodes, on machines that share nothing, and flows that use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import count
from typing import Any, Final

import psutil
from waiting import wait_until

from machines.bed import ROOT, Machine, Machines
from machines.clusters import start_ray
from schemas.errors import UserError

FOLDER: Final = "/tmp/flow"
FOREVER: Final = "import os, socket, time; print(socket.gethostname(), os.getpid(), flush=True); time.sleep(1e6)"
SECRET: Final = "b5f0-a-secret-of-the-flow-93c1"
NUMBERS: Final = count()


class Flow:
    """A flow on a machine, that obeys `ray_flow.py`'s orders."""

    def __init__(self, machine: Machine, head: str) -> None:
        self.machine = machine
        self.folder = f"{FOLDER}{next(NUMBERS)}"
        machine.run(["mkdir", self.folder])
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": head, "AREAL_SECRET": SECRET}
        command = [sys.executable, str(ROOT / "tests" / "launchers" / "ray_flow.py"), self.folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = machine.popen(command, environment, **pipes)

    def ask(self, function: str, **arguments: object) -> Any:
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]

    def waiting(self, name: str) -> str:
        return str(self.ask("state", name=name)[0])

    def exit_code(self, name: str) -> int | None:
        code: int | None = self.ask("state", name=name)[1]
        return code

    def ended(self, name: str) -> int:
        """The exit code, once it has ended."""
        wait_until(lambda: self.exit_code(name) is not None, f"the end of {name}")
        return self.ask("state", name=name)[1]  # type: ignore[no-any-return]

    def output(self, name: str) -> str:
        """What it has printed, once it has printed something."""
        file = self.machine.path(f"{self.folder}/{name}.out")
        wait_until(file.exists, f"output of {name}")
        return file.read_text()

    def forever(self, name: str, **resources: int) -> tuple[str, int]:
        """Submit a task that runs until it is ended: its machine and its process there."""
        self.ask("submit", name=name, code=FOREVER, **resources)
        host, process = self.output(name).split()
        return host, int(process)


class Bed:
    """Ray on three machines; flows are on the head, which runs no task."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.address = f"{machines['head'].address}:6379"
        start_ray(machines["head"], "--head", "--num-cpus=0", "--include-dashboard=false")
        for name in ("node1", "node2"):
            start_ray(machines[name], f"--address={self.address}", "--num-cpus=2", **machines.s3)

    def flow(self) -> Flow:
        return Flow(self.machines["head"], self.address)

    def gone(self, host: str, process: int) -> bool:
        return not self.machines[host].path(f"/proc/{process}").exists()


def ray_processes(bed: Bed) -> list[psutil.Process]:
    """Those of the head's GCS, of the raylets, of the drivers, and of Ray's workers."""
    found = [one for machine in bed.machines for one in psutil.Process(machine.pid).children(recursive=True)]
    return [one for one in found if re.search(r"gcs_server|raylet|ray_driver|ray::", " ".join(one.cmdline()[:3]))]
