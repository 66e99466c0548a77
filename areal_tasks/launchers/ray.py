"""Tasks on a Ray cluster that runs already, at `RAY_ADDRESS`.

Only a separate process imports Ray (`ray_driver.py`). When that process ends or is silent for too long, Ray ends what
it has started, and its tasks count as lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from areal_tasks.launchers.cluster import LOST, ClusterUnreachable, Machine, Resources, Task
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher, RaySettings

log = logging.getLogger(__name__)

ADDRESS: Final = "RAY_ADDRESS"
DRIVER: Final = "areal_tasks.launchers.ray_driver"
REACH_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0
#: Longer than short network failures; Ray itself gives up a head node that does not answer for 60 s.
SILENT_SECONDS: Final = 75.0
SUBMIT_SECONDS: Final = 10.0
CANCEL_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 15.0
SUBMITTED: Final = "it is being submitted to Ray"
#: The variables that the driver inherits, in addition to Ray's own: others may hold secrets.
PASSED: Final = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
VERSIONS: Final = "Flow and cluster need the same version of Ray and of Python."
JOIN: Final = (
    "This machine must be a node of the cluster (ray start --address=HOST:PORT, with --num-cpus=0 if nothing is to run "
    "here), reach all ports of the others, and have the cluster's token if it has one (RAY_AUTH_MODE, RAY_AUTH_TOKEN)."
)


class RayTask:
    """A task, as Ray's driver last reported it."""

    def __init__(self, task: Task, driver: RayDriver) -> None:
        self.task = task
        self.driver = driver
        self.why = SUBMITTED
        self.refused = False
        self.code: int | None = None

    def waiting(self) -> str:
        return self.why

    def exit_code(self) -> int | None:
        return self.code

    def cancel(self) -> None:
        """Have Ray kill the task, which is certain, but may happen after this returns."""
        self.driver.order("cancel", name=self.task.name)
        self.driver.wait(lambda: self.code is not None, CANCEL_SECONDS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Note the state that an event reports."""
        self.why = event.get("why", "")
        self.refused = event["event"] == "refused"
        self.code = LOST if self.refused else event.get("code")
        if printed := event.get("printed"):
            self.task.output.parent.mkdir(parents=True, exist_ok=True)
            with self.task.output.open("a") as output:
                output.write(printed)


class RayDriver:
    """A connection to the driver process: sends it orders; a thread reads its events."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.orders = process, process.stdin
        self.tasks: dict[str, RayTask] = {}
        self.connected = self.over = False
        self.failure = ""
        self.nodes: list[dict[str, Any]] | None = None  # as it last listed them
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, args=[process.stdout.fileno()], name="ray-events", daemon=True).start()

    def submit(self, task: Task, settings: RaySettings) -> RayTask:
        """Submit a task. Returns once Ray has accepted it, before it has found a node; or when Ray does not answer."""
        with self._changed:
            found = self.tasks[task.name] = RayTask(task, self)
            found.code = LOST if self.over else None
        asked = {"bundle": bundle(task, settings), "autoscaling": settings.autoscaling}
        self.order("submit", name=task.name, command=task.command, environment=dict(task.environment), **asked)
        self.wait(lambda: found.why != SUBMITTED, SUBMIT_SECONDS)
        if found.refused:
            raise UserError(
                f"Ray cannot run {task.name}: {found.why}. Ask for less (launcher.resources), or start a node that has "
                "as much."
            )
        return found

    def list_nodes(self) -> list[dict[str, Any]]:
        """Name, resources and free resources of each node. Raises ClusterUnreachable if Ray does not answer."""
        self.nodes = None
        self.order("nodes")
        self.wait(lambda: self.nodes is not None, SUBMIT_SECONDS)
        if self.nodes is None:
            raise ClusterUnreachable(f"Ray has not listed its nodes within {SUBMIT_SECONDS:g} s")
        return self.nodes

    def order(self, order: str, **more: object) -> None:
        """Send an order to the process; without effect once it has ended."""
        with contextlib.suppress(OSError, ValueError), self._changed:
            self.orders.write(json.dumps({"order": order, **more}).encode() + b"\n")
            self.orders.flush()

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition is true or the process has ended, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or condition(), seconds)

    def close(self) -> None:
        """End the process, and thereby its tasks; by force if Ray does not answer."""
        with contextlib.suppress(OSError):
            self.orders.close()
        self.wait(lambda: False, CLOSE_SECONDS)
        self.process.kill()
        self.process.wait()

    def _follow(self, events: int) -> None:
        """Read events until the process is silent or has ended, or an event is invalid: then its tasks are lost."""
        try:
            for line in lines(events, SILENT_SECONDS):
                with self._changed:
                    self._take(json.loads(line))
                    self._changed.notify_all()
        except Exception:
            log.exception("Ray's tasks are no longer followed, and end")
        finally:
            self._lose()

    def _lose(self) -> None:
        self.process.kill()
        with self._changed:
            self.over = True
            for task in self.tasks.values():
                task.code = LOST
            self._changed.notify_all()

    def _take(self, event: Mapping[str, Any]) -> None:
        self.connected = self.connected or event["event"] == "connected"
        if event["event"] == "failed":
            self.failure = event["why"]
        if event["event"] == "nodes":
            self.nodes = event["nodes"]
        if task := self.tasks.get(event.get("name", "")):
            task.take(event)
            if task.code is not None:
                del self.tasks[task.task.name]


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
        log = Path(tempfile.mkstemp(prefix="arealflow-ray-", suffix=".log")[1])
        nodes = self._connected(log).list_nodes()
        log.unlink()  # an error names it
        own = self.settings.resources
        return [machine(node, own) for node in nodes if not lacking(own, node["total"])]

    def _connected(self, log: Path) -> RayDriver:
        with self._lock:
            if self._driver is None or self._driver.over:
                self._driver = connected(log)
            return self._driver

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()


def connected(printed: Path) -> RayDriver:
    """A driver that has joined the cluster.

    Raises:
        UserError: flow and cluster have different versions.
        ClusterUnreachable: it could not join for another reason.
    """
    address = cluster_address()
    printed.parent.mkdir(parents=True, exist_ok=True)
    driver = RayDriver(start_driver(printed))
    driver.wait(lambda: driver.connected or driver.failure != "", CONNECT_SECONDS)
    if driver.connected:
        return driver
    driver.close()
    cause = driver.failure or f"no answer in {CONNECT_SECONDS:g} s"
    found = f"{ADDRESS}={address}: this process cannot join the Ray cluster: {cause.strip()}\n"
    if "Version mismatch" in cause:
        raise UserError(found + VERSIONS)
    raise ClusterUnreachable(f"{found}{JOIN} Ray's messages: {printed}")


def cluster_address() -> str:
    """The cluster's address, after a check that a process listens there.

    Raises:
        UserError: none is named, or Ray is not installed.
        ClusterUnreachable: nothing listens.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("launcher.type: ray needs Ray, which is not installed: pip install 'arealflow[ray]'")
    address = os.environ.get(ADDRESS, "")
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        raise UserError(
            f"{ADDRESS}={address!r} is not the HOST:PORT of a Ray cluster's head node; its port is usually 6379"
        )
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


def machine(node: Mapping[str, Any], own: Mapping[str, float]) -> Machine:
    """A node as Ray's driver lists it; `own`: further resources that each service occupies."""
    used = lacking(own, node["free"])
    return Machine(
        node["name"], _resources(node["total"]), _resources(node["free"]), f"without free {used[0]}" if used else ""
    )


def lacking(asked: Mapping[str, float], has: Mapping[str, float]) -> list[str]:
    """The names of resources of which there is too little."""
    return [name for name, amount in asked.items() if has.get(name, 0) < amount]


def _resources(has: Mapping[str, float]) -> Resources:
    return Resources(int(has.get("CPU", 0)), int(has.get("GPU", 0)), int(has.get("memory", 0)) >> 20)


def lines(descriptor: int, seconds: float) -> Iterator[bytes]:
    """Lines as they arrive, until the end of the file, or until nothing has arrived for `seconds`."""
    rest = b""
    ready = select.poll()
    ready.register(descriptor)
    while ready.poll(seconds * 1000) and (data := os.read(descriptor, 1 << 16)):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
