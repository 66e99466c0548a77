"""The process that calls Ray: `python -m areal_tasks.launchers.ray_driver`, started by `launchers/ray.py`.

It reads orders from standard input and writes an answer to each to standard output, all of them lines of JSON. Only
this process calls Ray: a call may wait for minutes for a cluster that does not answer, and Ray changes the signal
handlers and threads of its process. Ray ends what a driver has started when the driver ends, as this one does when its
standard input ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray._private.state import available_resources_per_node  # no public function of plain Ray says this
from ray._private.state import state as cluster_state  # nor which nodes are drained
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_tasks.launchers.cluster import LOST, PREEMPTED

GET_SECONDS: Final = 10.0
MOST_BYTES: Final = 1 << 16
#: Only this text of Ray's says that a node was taken away on purpose: by `ray stop`, or by an autoscaler.
TAKEN: Final = "node was terminated expectedly"
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
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", TIED, str(os.getpid()), *command],
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> tuple[bytes, int | None]:
        """The command's output since the last poll; with the last part of it, the exit code."""
        code = self.child.poll()
        printed = os.pread(self.printed.fileno(), MOST_BYTES, self.delivered)
        self.delivered += len(printed)
        return printed, code if len(printed) < MOST_BYTES else None

    def terminate(self) -> None:
        """Ask the command to end, which it may do later."""
        self.child.terminate()


@dataclass
class Started:
    """A task: the resources that it occupies, its placement group and actor, and the poll in progress."""

    bundle: dict[str, float]
    group: Any
    actor: Any
    poll: Any
    runs: bool = False
    leaves: bool = False  # it has been asked to end, since its node is being drained


class Driver:
    """Executes orders: its public methods, whose results are the answers."""

    def __init__(self) -> None:
        self.tasks: dict[str, Started] = {}
        self.known: dict[str, dict[str, float]] = {}  # resources of every node that has been part of the cluster

    def submit(
        self, name: str, command: list[str], environment: dict[str, str], bundle: dict[str, float], autoscaling: bool
    ) -> str:
        """Have Ray find a node for a command. Returns why no node can ever run it; empty if one can."""
        self._note_nodes()
        if autoscaling or any(fits(bundle, node) for node in self.known.values()):
            self.tasks[name] = start(name, bundle, command, environment)
            return ""
        nodes = "; ".join(sorted({shown(node, bundle) for node in self.known.values()}))
        return f"it needs {shown(bundle)} of one node; the nodes have: {nodes}"

    def states(self, cancelled: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The state of each task: see `RayTask.take`. Those that are `cancelled` end; ended ones are forgotten.

        Those on a node that is being drained are asked to end, so that they start elsewhere while there is time.
        """
        self._note_nodes()
        draining = cluster_state.get_draining_nodes()
        for task in self.tasks.values():
            if not task.leaves and draining and node(task.group) in draining:
                task.leaves = True
                task.actor.terminate.remote()
        killed = {"code": -signal.SIGKILL}
        found = {name: killed if name in cancelled else state(task) for name, task in self.tasks.items()}
        for name in [name for name, now in found.items() if now.get("code") is not None]:
            ended = self.tasks.pop(name)
            ray.kill(ended.actor)  # and with it the command
            remove_placement_group(ended.group)
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """Name, id, resources and free resources of each node that is alive, and whether it is being drained."""
        free, draining = available_resources_per_node(), cluster_state.get_draining_nodes()
        return [
            {
                "name": found["NodeManagerHostname"],
                "id": found["NodeID"],
                "total": found["Resources"],
                "free": free.get(found["NodeID"], {}),
                "draining": found["NodeID"] in draining,
            }
            for found in ray.nodes()
            if found["Alive"]
        ]

    def _note_nodes(self) -> None:
        self.known |= {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


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
    return Started(bundle, group, actor, actor.poll.remote())


def state(task: Started) -> dict[str, Any]:
    """What it waits for; once it runs, what it has printed since, and its exit code."""
    if not ray.wait([task.poll], timeout=0)[0]:
        return {} if task.runs else {"code": PREEMPTED} if task.leaves else {"why": lacking(task)}
    task.runs = True
    try:
        printed, code = ray.get(task.poll, timeout=GET_SECONDS)
    except RayError as error:
        return {"printed": f"{error}\n", "code": PREEMPTED if task.leaves or TAKEN in str(error) else LOST}
    task.poll = task.actor.poll.remote()
    ended = PREEMPTED if task.leaves and code is not None else code
    return {"printed": printed.decode(errors="surrogateescape"), "code": ended}


def node(group: Any) -> str:
    """The ID of the node that Ray has found for a placement group; empty if it has found none."""
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def lacking(task: Started) -> str:
    """Why a task does not run yet."""
    if placement_group_table(task.group)["state"] == "CREATED":
        return "its resources are reserved; Ray is starting a worker there"
    free, whole = (shown(found, task.bundle) for found in (ray.available_resources(), ray.cluster_resources()))
    return f"waits for {shown(task.bundle)} of one node; free in the whole cluster: {free}, of {whole}"


def fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(key, 0) >= value for key, value in bundle.items())


def shown(resources: Mapping[str, float], keys: Mapping[str, float] | None = None) -> str:
    """`2 CPU, 1 GPU, 512 MiB memory`: the resources that `keys` names; None: all."""
    return ", ".join(amount(key, resources.get(key, 0)) for key in (resources if keys is None else keys))


def amount(key: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB {key}" if key == "memory" else f"{value:g} {key}"


def main() -> None:
    """Connect to Ray, and execute orders until standard input ends. The first answer is why that failed, or empty."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log
    failure = ""
    try:
        ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    except Exception as error:
        failure = str(error) or type(error).__name__
    print(json.dumps(failure), file=answers, flush=True)
    driver = Driver()
    for line in sys.stdin if not failure else ():
        order, values = json.loads(line)
        print(json.dumps(getattr(driver, order)(**values)), file=answers, flush=True)


if __name__ == "__main__":
    main()
