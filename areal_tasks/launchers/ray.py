"""Tasks on a Ray cluster that runs already, at `RAY_ADDRESS`.

Only a separate process imports Ray (`ray_driver.py`). When that process ends, Ray ends what it has started. If it does
not answer for too long, it is killed. In both cases its tasks count as lost.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from areal_tasks.launchers.cluster import LOST, ClusterUnreachable, Machine, Resources, Task
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher, RaySettings

ADDRESS: Final = "RAY_ADDRESS"
DRIVER: Final = "areal_tasks.launchers.ray_driver"
REACH_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0
#: Longer than short network failures; Ray itself gives up a head node that does not answer for 60 s.
SILENT_SECONDS: Final = 75.0
POLL_SECONDS: Final = 0.5  # between two questions for the states of all tasks
CANCEL_SECONDS: Final = 10.0
#: The variables that the driver inherits, in addition to Ray's own: others may hold secrets.
PASSED: Final = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
VERSIONS: Final = "Flow and cluster need the same version of Ray and of Python."
JOIN: Final = (
    "This machine must be a node of the cluster (ray start --address=HOST:PORT, with --num-cpus=0 if nothing is to run "
    "here), reach all ports of the others, and have the cluster's token if it has one (RAY_AUTH_MODE, RAY_AUTH_TOKEN)."
)


class RayTask:
    """A task, as Ray's driver last reported it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.why = "Ray is looking for a node"
        self.code: int | None = None
        self.cancelled = False
        self._ended = threading.Event()

    def waiting(self) -> str:
        return self.why

    def exit_code(self) -> int | None:
        return self.code

    def cancel(self) -> None:
        """Have Ray kill the task, which is certain, but may happen after this returns."""
        self.cancelled = True
        self._ended.wait(CANCEL_SECONDS)

    def take(self, why: str = "", printed: str = "", code: int | None = None) -> None:
        """Note what it waits for, its further output (bytes that are no UTF-8 are escaped), and its exit code."""
        self.why, self.code = why, code
        if printed:
            self.task.output.parent.mkdir(parents=True, exist_ok=True)
            with self.task.output.open("ab") as output:
                output.write(printed.encode(errors="surrogateescape"))
        if code is not None:
            self._ended.set()


class RayDriver:
    """A connection to the driver process, which answers one order at a time. A thread asks for the tasks' states."""

    def __init__(self, address: str, printed: Path) -> None:
        """Start the process, and wait until it has joined the cluster. Its messages and Ray's go to the file `printed`.

        UserError if flow and cluster have different versions; ClusterUnreachable if it cannot join for another reason.
        """
        self.printed = printed
        self.process = process = start_driver(printed)
        assert process.stdin is not None and process.stdout is not None
        self.orders, self.answers = process.stdin, process.stdout
        self.tasks: dict[str, RayTask] = {}
        self._lock = threading.Lock()
        try:
            cause = self._answer(CONNECT_SECONDS).strip()
        except ValueError:
            cause = f"no answer in {CONNECT_SECONDS:g} s"
        if cause:
            self.close()
            found = f"{ADDRESS}={address}: this process cannot join the Ray cluster: {cause}\n"
            if "Version mismatch" in cause:
                raise UserError(found + VERSIONS)
            raise ClusterUnreachable(f"{found}{JOIN} Ray's messages: {self.printed}")
        threading.Thread(target=self._follow, name="ray-tasks", daemon=True).start()

    def submit(self, task: Task, settings: RaySettings) -> RayTask:
        """Submit a task. Returns once Ray has accepted it, before it has found a node."""
        found = self.tasks[task.name] = RayTask(task)
        asked = {"bundle": bundle(task, settings), "autoscaling": settings.autoscaling}
        order = {"name": task.name, "command": task.command, "environment": dict(task.environment), **asked}
        if why := self.ask("submit", **order):
            del self.tasks[task.name]
            raise UserError(
                f"Ray cannot run {task.name}: {why}. Ask for less (launcher.resources), or start a node that has as "
                "much."
            )
        return found

    def ask(self, order: str, **values: object) -> Any:
        """The process's answer to an order. ClusterUnreachable without one: then the process is killed."""
        with self._lock:
            try:
                self.orders.write(json.dumps([order, values]).encode() + b"\n")
                self.orders.flush()
                return self._answer(SILENT_SECONDS)
            except (OSError, ValueError) as error:
                self.close()
                what = f"Ray's driver has ended, or has not answered for {SILENT_SECONDS:g} s"
                raise ClusterUnreachable(f"{what}. Ray's messages: {self.printed}") from error

    def close(self) -> None:
        """End the process, and thereby its tasks."""
        self.process.kill()
        self.process.wait()

    def _answer(self, seconds: float) -> Any:
        """The next answer. ValueError if the process has ended, or none has come within `seconds`."""
        return json.loads(self.answers.readline() if wait([self.answers.fileno()], seconds) else b"")

    def _follow(self) -> None:
        """Ask for the states of the tasks until the process does not answer: then they are lost."""
        try:
            with suppress(ClusterUnreachable):  # the tasks' ends report it
                while True:
                    cancelled = [name for name, task in list(self.tasks.items()) if task.cancelled]
                    for name, state in self.ask("states", cancelled=cancelled).items():
                        self.tasks[name].take(**state)
                        if self.tasks[name].code is not None:
                            del self.tasks[name]
                    time.sleep(POLL_SECONDS)
        finally:
            self.close()
            for task in list(self.tasks.values()):
                task.take(code=LOST)


class RayCluster:
    """Submits tasks through a driver process. One that has ended is replaced at the next submission."""

    def __init__(self, settings: Launcher) -> None:
        """Raises UserError: Ray is not installed, or nothing answers at `RAY_ADDRESS`."""
        cluster_address()
        self.settings = settings.ray
        self._driver: RayDriver | None = None
        self._lock = threading.Lock()

    def submit(self, task: Task) -> RayTask:
        """Submit a task. Raises UserError and ClusterUnreachable as every cluster does, within about a minute."""
        return self._connected(task.output.with_name("ray.log")).submit(task, self.settings)

    def machines(self) -> list[Machine]:
        """The nodes that have the resources that `launcher.ray.resources` names."""
        descriptor, name = tempfile.mkstemp(prefix="arealflow-ray-", suffix=".log")
        os.close(descriptor)
        log = Path(name)
        nodes = self._connected(log).ask("nodes")
        log.unlink()  # an error names it
        own = self.settings.resources
        return [machine(node, own) for node in told_apart(nodes) if not lacking(own, node["total"])]

    def _connected(self, log: Path) -> RayDriver:
        with self._lock:
            if self._driver is None or self._driver.process.poll() is not None:
                self._driver = RayDriver(cluster_address(), log)
            return self._driver

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()


def cluster_address() -> str:
    """The cluster's address, after a check that a process listens there; ClusterUnreachable if none does.

    UserError if no address is named, or Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("launcher.type: ray needs Ray, which is not installed: pip install 'arealflow[ray]'")
    address = os.environ.get(ADDRESS, "")
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        found = f"{ADDRESS}={address!r} is not" if address else f"{ADDRESS} is not set: export, before `arealflow up`,"
        raise UserError(f"{found} the HOST:PORT of a Ray cluster's head node; its port is usually 6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ClusterUnreachable(
            f"No Ray cluster answers at {ADDRESS}={address}: {error}. Start it, or name its head node."
        ) from error
    return address


def start_driver(printed: Path) -> subprocess.Popen[bytes]:
    """Start the driver process, in a session of its own so that Ctrl-C does not reach it."""
    own = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("RAY_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    printed.parent.mkdir(parents=True, exist_ok=True)
    with printed.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", DRIVER],
            cwd="/",  # Ray adds the working directory to the import path of its workers
            env={**own, "PYTHONPATH": paths, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )


def bundle(task: Task, settings: RaySettings) -> dict[str, float]:
    """The resources to reserve, by Ray's names; memory in bytes."""
    asked = task.resources
    amounts = {"CPU": asked.cpus, "GPU": asked.gpus, "memory": asked.memory_mb << 20, **settings.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def told_apart(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes, with the beginning of their ids in the names of those whose hosts have the same name."""
    hosts = Counter(node["name"] for node in nodes)
    return [
        {**node, "name": f"{node['name']} ({node['id'][:8]})"} if hosts[node["name"]] > 1 else node for node in nodes
    ]


def machine(node: Mapping[str, Any], own: Mapping[str, float]) -> Machine:
    """A node as Ray's driver lists it; `own`: further resources that each service occupies."""
    used = lacking(own, node["free"])
    state = "being drained" if node["draining"] else f"without free {used[0]}" if used else ""
    return Machine(node["name"], _resources(node["total"]), _resources(node["free"]), state)


def lacking(asked: Mapping[str, float], has: Mapping[str, float]) -> list[str]:
    """The names of resources of which there is too little."""
    return [name for name, amount in asked.items() if has.get(name, 0) < amount]


def _resources(has: Mapping[str, float]) -> Resources:
    return Resources(int(has.get("CPU", 0)), int(has.get("GPU", 0)), int(has.get("memory", 0)) >> 20)
