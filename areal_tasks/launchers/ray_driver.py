"""The process that calls Ray: `python -m areal_tasks.launchers.ray_driver`, started by `launchers/ray.py`.

It reads orders from standard input and writes events to standard output, one JSON object per line. Only this process
calls Ray: a call may wait for minutes for a cluster that does not answer, and Ray changes the signal handlers and
threads of its process. Ray ends what a driver has started when the driver ends, as this one does when its standard
input ends.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TextIO

import ray
from ray._private.state import available_resources_per_node  # no public function of plain Ray says this
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_tasks.launchers.cluster import LOST

POLL_SECONDS: Final = 0.1
HEARTBEAT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0
END_SECONDS: Final = 10.0
MOST_BYTES: Final = 1 << 16
#: A task ends itself when its driver has not polled it for so long: on a node without network Ray lets it continue.
LEASE_SECONDS: Final = 60.0
#: Runs a command that the kernel kills (PR_SET_PDEATHSIG, SIGKILL) when the thread that started it ends.
TIED: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error}")
"""


class Runner:
    """The actor that runs a command as its child. Ray copies classes of `__main__` to nodes, which need only Ray."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the actor)
        self.delivered = 0
        self.polled = time.monotonic()
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", TIED, str(os.getpid()), *command],
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._end_unwatched, daemon=True).start()

    def poll(self, seconds: float) -> tuple[str, int | None]:
        """The command's output since the last poll, and its exit code; waits at most `seconds` for its end."""
        self.polled = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)
        code = self.child.poll()
        printed = os.pread(self.printed.fileno(), MOST_BYTES, self.delivered)
        ended = code is not None and len(printed) < MOST_BYTES
        text, length = codecs.utf_8_decode(printed, "replace", ended)  # else a character that is cut off comes later
        self.delivered += length
        return text, code if ended else None

    def _end_unwatched(self) -> None:
        while time.monotonic() < self.polled + LEASE_SECONDS:
            time.sleep(ANSWER_SECONDS)
        os._exit(1)  # the command ends with this process


@dataclass
class Started:
    """A task: the resources that it occupies, its placement group and actor, and the poll in progress."""

    bundle: dict[str, float]
    group: Any
    actor: Any
    poll: Any
    runs: bool = False
    cancelled: bool = False

    def end(self) -> None:
        """Have Ray kill the actor, and with it the command."""
        ray.kill(self.actor)
        remove_placement_group(self.group)


class Driver:
    """Executes orders, and reports what happens to tasks."""

    def __init__(self, events: TextIO) -> None:
        self.events = events
        self.orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self.tasks: dict[str, Started] = {}
        self.nodes: dict[str, dict[str, float]] = {}  # resources of every node that has been part of the cluster
        self.heartbeat_due = 0.0

    def run(self) -> None:
        """Execute orders until one is `end`."""
        self.emit("connected")
        while self._execute_orders():
            self._poll()
            self._heartbeat()
        for task in self.tasks.values():
            task.end()

    def emit(self, event: str, **more: Any) -> None:
        print(json.dumps({"event": event, **more}), file=self.events, flush=True)

    def read_orders(self) -> None:
        """Queue orders until standard input ends. Then the process ends, by force if Ray does not answer."""
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put({"order": "end"})
        time.sleep(END_SECONDS)
        os._exit(1)

    def _execute_orders(self) -> bool:
        """Execute the orders that have arrived. Returns False if the last one is `end`."""
        with contextlib.suppress(queue.Empty):
            while (order := self.orders.get(timeout=0 if self.tasks else POLL_SECONDS))["order"] != "end":
                self._execute(order)
            return False
        return True

    def _execute(self, order: dict[str, Any]) -> None:
        match order["order"]:
            case "submit":
                self._submit(order)
            case "cancel":
                self._cancel(order["name"])
            case "nodes":
                self.emit("nodes", nodes=listed())

    def _submit(self, order: dict[str, Any]) -> None:
        name, bundle = order["name"], order["bundle"]
        self._update_nodes()
        if order["autoscaling"] or any(map(fits(bundle), self.nodes.values())):
            self.tasks[name] = start(name, bundle, order["command"], order["environment"])
            self.emit("accepted", name=name, why="Ray is looking for a node")
        else:
            nodes = "; ".join(sorted({shown(node, bundle) for node in self.nodes.values()}))
            self.emit("refused", name=name, why=f"it needs {shown(bundle)} of one node; the nodes have: {nodes}")

    def _cancel(self, name: str) -> None:
        if name in self.tasks:
            self.tasks[name].cancelled = True
            self.tasks[name].end()

    def _poll(self) -> None:
        """Report a task whose poll is done: it has ended, or a second is over."""
        polls = {task.poll: name for name, task in self.tasks.items()}
        done = ray.wait(list(polls), num_returns=1, timeout=POLL_SECONDS)[0] if polls else []
        for poll in done:
            self._report(polls[poll])

    def _report(self, name: str) -> None:
        task = self.tasks[name]
        printed, code = outcome(task)
        if not task.runs or printed:
            self.emit("runs", name=name, printed=printed)
            task.runs = True
        if code is None:
            task.poll = task.actor.poll.remote(ANSWER_SECONDS)
            return
        del self.tasks[name]
        task.end()
        self.emit("ended", name=name, code=code)

    def _heartbeat(self) -> None:
        """Once a second: emit a heartbeat, and what tasks wait for."""
        if time.monotonic() < self.heartbeat_due:
            return
        self.emit("heartbeat")
        self._update_nodes()
        for name, task in self.tasks.items():
            if not task.runs:
                self.emit("waits", name=name, why=lacking(task))
        self.heartbeat_due = time.monotonic() + HEARTBEAT_SECONDS

    def _update_nodes(self) -> None:
        self.nodes |= {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def start(name: str, bundle: dict[str, float], command: list[str], environment: dict[str, str]) -> Started:
    """Reserve the resources, and start the command there once Ray has found a node."""
    group = placement_group([bundle], name=name)
    own = {key: value for key, value in bundle.items() if key not in ("CPU", "GPU", "memory")}
    options = {
        "name": name,
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "memory": bundle.get("memory"),
        "resources": own,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    hidden = {} if "GPU" in bundle else {"CUDA_VISIBLE_DEVICES": ""}  # else Ray sets it
    actor = ray.remote(Runner).options(**options).remote(command, {**environment, **hidden})
    return Started(bundle, group, actor, actor.poll.remote(0.0))


def outcome(task: Started) -> tuple[str, int | None]:
    """The result of a finished poll: the output, and the exit code."""
    try:
        found: tuple[str, int | None] = ray.get(task.poll, timeout=END_SECONDS)
        return found
    except RayError as error:
        return ("", -signal.SIGKILL) if task.cancelled else (f"{error}\n", LOST)


def lacking(task: Started) -> str:
    """Why a task does not run yet."""
    if placement_group_table(task.group)["state"] == "CREATED":
        return "its resources are reserved; Ray is starting a worker there"
    free, whole = (shown(found, task.bundle) for found in (ray.available_resources(), ray.cluster_resources()))
    return f"waits for {shown(task.bundle)} of one node; free in the whole cluster: {free}, of {whole}"


def listed() -> list[dict[str, Any]]:
    """Name, resources and free resources of each node that is alive."""
    free = available_resources_per_node()
    return [
        {"name": node["NodeManagerHostname"], "total": node["Resources"], "free": free.get(node["NodeID"], {})}
        for node in ray.nodes()
        if node["Alive"]
    ]


def fits(bundle: Mapping[str, float]) -> Any:
    """A predicate: whether a node has these resources when it is empty."""
    return lambda node: all(node.get(key, 0) >= value for key, value in bundle.items())


def shown(resources: Mapping[str, float], keys: Mapping[str, float] | None = None) -> str:
    """`2 CPU, 1 GPU, 512 MiB memory`: the resources that `keys` names; None: all."""
    return ", ".join(amount(key, resources.get(key, 0)) for key in (resources if keys is None else keys))


def amount(key: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB {key}" if key == "memory" else f"{value:g} {key}"


def main() -> None:
    """Connect to Ray, and execute orders until standard input ends."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log
    driver = Driver(events)
    threading.Thread(target=driver.read_orders, daemon=True).start()
    try:
        ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    except Exception as error:
        driver.emit("failed", why=str(error))
        return
    driver.run()
    ray.shutdown()


if __name__ == "__main__":
    main()
