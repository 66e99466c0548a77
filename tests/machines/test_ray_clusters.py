"""Ray's nodes and heads that are lost, and whole runs on its clusters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Final

import pytest
from waiting import wait_until

from areal_tasks.launchers.cluster import LOST
from machines.bed import NETWORK, ROOT, Machines
from machines.clusters import start_ray
from machines.ray_bed import FOREVER, Bed, Flow, ray_processes
from machines.runs import UNTRAINED
from schemas.errors import UserError

ADDED: Final = {"resources": {"CPU": 2, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 3}
#: Ray's autoscaler. The nodes that it adds are raylets of the head's machine, and go after 12 s without work.
AUTOSCALING: Final = {
    "cluster_name": "bed",
    "max_workers": 3,
    "provider": {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True},
    "available_node_types": {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}}, "added": ADDED},
    "head_node_type": "ray.head.default",
    "idle_timeout_minutes": 0.2,
    **{unused: {} for unused in ("auth", "file_mounts", "cluster_synced_files")},
    **{unused: [] for unused in ("worker_setup_commands", "worker_start_ray_commands")},
}


@pytest.mark.slow("Ray takes half a minute to find that a node is lost")
def test_lost_nodes() -> None:
    """A task is lost with a node that vanishes, or that is cut off."""
    with Machines("head", "node1", "node2") as machines:
        bed = Bed(machines)
        flow = bed.flow()
        first, second = flow.forever("a", cpus=2), flow.forever("b", cpus=1)
        machines.cut(second[0])
        assert flow.ended("b") == LOST and flow.exit_code("a") is None
        machines[first[0]].kill()
        assert flow.ended("a") == LOST
        assert "node has died" in flow.output("a")
        flow.ask("submit", name="c", code=FOREVER, cpus=2)
        wait_until(lambda: "waits for 2 CPU" in flow.waiting("c"), "a reason")
        flow.ask("close")


@pytest.mark.slow("Ray's driver gives up a head that has ended after a minute")
def test_a_lost_head() -> None:
    with Machines("head", "node1", "node2") as machines:
        bed = Bed(machines)
        flow = bed.flow()
        where = flow.forever("a")
        head = [one for one in ray_processes(bed) if "gcs_server" in one.cmdline()[0]]
        head[0].kill()
        assert flow.exit_code("a") is None
        with pytest.raises(UserError, match="Ray's driver has ended, or has not answered"):
            flow.ask("submit", name="b", code=FOREVER)
        assert flow.ended("a") == LOST
        wait_until(lambda: bed.gone(*where), "the end of the task")
        with pytest.raises(UserError, match="No Ray cluster answers at RAY_ADDRESS"):
            flow.ask("submit", name="c", code=FOREVER)


@pytest.mark.slow("a whole quickstart, 2 min")
def test_the_quickstart_on_a_cluster() -> None:
    """Its services run on the nodes, which have the keys of the store from the environment of `ray start`."""
    with Machines("head", "node1", "node2", s3=True) as machines:
        bed = Bed(machines)
        place = ["launcher.type=ray", f"launcher.network={NETWORK}.0/24"]
        command = [sys.executable, "-m", "arealflow.command", "run", "quickstart", *place, "schedule.iterations=1"]
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": bed.address, **machines.s3}
        log = machines["head"].run(command, environment).stderr
        assert "iteration 0 done (1 of 1)" in log
        hosts = dict(re.findall(r"service (\S+) starts on (\S+)", log))
        assert hosts.keys() == {"trainer", "inference-0", "rollout-0", "rollout-evaluation"}
        assert set(hosts.values()) == {"node1", "node2"}


@pytest.mark.slow("a whole quickstart, 2 min")
def test_the_quickstart_on_nodes_that_the_autoscaler_adds() -> None:
    """The plan says what services wait for, nodes are added for them, and go when the run has ended."""
    with Machines("head", s3=True) as machines:
        head = machines["head"]
        head.path(config := "/tmp/autoscaling.json").write_text(json.dumps(AUTOSCALING))
        own = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", **machines.s3}
        start_ray(head, "--head", "--num-cpus=0", "--include-dashboard=false", f"--autoscaling-config={config}", **own)
        flow = Flow(head, address := f"{head.address}:6379")
        place = ["launcher.type=ray", f"launcher.network={NETWORK}.0/24", "launcher.ray.autoscaling=true"]
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address, **machines.s3}

        def arealflow(*arguments: str) -> subprocess.CompletedProcess[str]:
            return head.run([sys.executable, "-m", "arealflow.command", *arguments], environment)

        planned = json.loads(arealflow("plan", "quickstart", "--placement", "--json", *place).stdout)
        assert {row["state"] for row in planned} == {"waits"}
        assert "no node has 1 CPU; the largest has none: the autoscaler has to add a larger one" in planned[0]["why"]
        log = arealflow("run", "quickstart", "run=r", *place, *UNTRAINED, "schedule.iterations=1").stderr
        assert "service trainer starts on head" in log and "iteration 0 done (1 of 1)" in log
        assert "r: sound" in arealflow("audit", "r").stdout
        wait_until(lambda: flow.ask("machines") == [["head", 0, 0]], "the end of the added nodes")
