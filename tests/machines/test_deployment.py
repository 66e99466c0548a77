"""A deployment on machines: Prefect's server on one, its worker on another, services on nodes of Slurm or Ray."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Final

from waiting import wait_until

from machines.bed import NETWORK
from machines.clusters import CONTROL, HEAD, NODES, Cluster
from machines.runs import UNTRAINED, services, slurm_and_ray

SILENT: Final = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
OVERRIDES: Final = (f"launcher.network={NETWORK}.0/24", "rollout.workers=2", "schedule.iterations=2", *UNTRAINED)


@slurm_and_ray
def test_a_deployment_runs_on_a_cluster(cluster: Cluster) -> None:
    control, head = cluster.bed[CONTROL], cluster.bed[HEAD]
    server = {"PREFECT_API_URL": f"http://{control.address}:4200/api"}
    cluster.environment = cluster.environment | server
    control.popen(["prefect", "server", "start", "--host", control.address], **SILENT)
    wait_until(lambda: head.run(["prefect", "work-pool", "ls"], server, check=False).returncode == 0, "the server")
    head.run(["prefect", "work-pool", "create", "arealflow", "--type", "process"], server)
    cluster.arealflow("deploy", "quickstart")

    worker = cluster.popen(*cluster.prefect_worker())
    overrides = shlex.join([*cluster.place, *OVERRIDES])
    asked = ["--watch", "--param", "run=mine", "--param", f"overrides={overrides}"]
    control.run(["prefect", "deployment", "run", "rlhf/quickstart", *asked], server)
    worker.terminate()
    printed, _ = worker.communicate()
    hosts = dict(re.findall(r"service (\S+) starts on (\S+)", printed))
    assert hosts.keys() == {"trainer", "inference-0", "rollout-0", "rollout-1", "rollout-evaluation"}, printed
    assert len(set(hosts.values())) > 1
    assert set(hosts.values()) <= set(NODES)
    assert "mine: sound" in cluster.arealflow("audit", "mine")
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")
    wait_until(lambda: "raylet" not in head.run(["ps", "-eo", "args"]).stdout, "the end of Ray on the worker's machine")
