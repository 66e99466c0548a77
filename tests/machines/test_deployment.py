"""A deployment on machines: Prefect's server on one, its worker on another, services on nodes of Slurm or Ray."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from typing import Final

import pytest
from waiting import LIMIT, wait_until

from machines.bed import NETWORK, ROOT
from machines.clusters import CONTROL, HEAD, NODES, Cluster, OnStarters
from machines.runs import ASYNCHRONOUS, ITERATIONS, UNTRAINED, Lines, check_complete, query, services, slurm_and_ray

OTHER: Final = "other"

SILENT: Final = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
OVERRIDES: Final = (f"launcher.network={NETWORK}.0/24", "rollout.workers=2", "schedule.iterations=2", *UNTRAINED)


def serve(cluster: Cluster, *automations: str) -> dict[str, str]:
    """Prefect's server on CONTROL with a work pool, for which deployments may be made; its address and login."""
    control = cluster.bed[CONTROL]
    named = {"PREFECT_API_URL": f"http://{control.address}:4200/api", "PREFECT_API_AUTH_STRING": "me:login"}
    cluster.environment = cluster.environment | named
    asks = {"PREFECT_SERVER_API_AUTH_STRING": "me:login"}
    control.popen(["prefect", "server", "start", "--host", control.address], named | asks, **SILENT)
    wait_until(lambda: control.run(["prefect", "work-pool", "ls"], named, check=False).returncode == 0, "the server")
    control.run(["prefect", "work-pool", "create", "arealflow", "--type", "process"], named)
    for name in automations:
        file = ROOT / "deployments" / "automations" / f"{name}.yaml"
        control.run(["prefect", "automation", "create", "--from-file", str(file)], named)
    return named


@slurm_and_ray
def test_a_deployment_runs_on_a_cluster(cluster: Cluster) -> None:
    control, head, server = cluster.bed[CONTROL], cluster.bed[HEAD], serve(cluster)
    cluster.arealflow("deploy", "quickstart")

    worker = cluster.popen(*cluster.prefect_worker())
    overrides = shlex.join([*cluster.place, *OVERRIDES])
    asked = ["--watch", "--param", "run=mine", "--param", f"overrides={overrides}"]
    control.run(["prefect", "deployment", "run", "rlhf/quickstart", *asked], server)
    worker.terminate()
    printed, _ = worker.communicate(timeout=LIMIT)
    hosts = dict(re.findall(r"service (\S+) starts on (\S+)", printed))
    assert hosts.keys() == {"trainer", "inference-0", "rollout-0", "rollout-1", "rollout-evaluation"}, printed
    assert len(set(hosts.values())) > 1
    assert set(hosts.values()) <= set(NODES)
    assert "mine: sound" in cluster.arealflow("audit", "mine")
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")
    wait_until(lambda: "raylet" not in head.run(["ps", "-eo", "args"]).stdout, "the end of Ray on the worker's machine")


class WithTwoWorkers(OnStarters):
    names = (*Cluster.names, OTHER)


@pytest.mark.slow("Prefect counts a flow run as lost after 100 s")
@pytest.mark.parametrize("cluster", [WithTwoWorkers], indirect=True)
def test_a_flow_run_that_was_cut_off_goes_on_in_another_worker_and_ends_there(cluster: Cluster) -> None:
    """When its first machine is back, that process leaves run and flow run to the later one."""
    control, server = cluster.bed[CONTROL], serve(cluster, "recovery", "lost")
    cluster.arealflow("deploy", "quickstart-async")
    first = Lines(cluster.popen(*cluster.prefect_worker()))
    overrides = shlex.join([*cluster.place, f"launcher.network={NETWORK}.0/24", *ASYNCHRONOUS[2:]])
    asked = ["--param", "run=r", "--param", f"overrides={overrides}"]
    control.run(["prefect", "deployment", "run", "rlhf/quickstart-async", *asked], server)
    first.wait_for("iteration 5 done")
    cluster.bed.cut(HEAD)
    cut = time.monotonic()
    cluster.head = OTHER
    second = Lines(cluster.popen(*cluster.prefect_worker()))
    second.wait_for("start #2", limit=3 * LIMIT)
    second.wait_for(" done (")
    cluster.bed.restore(HEAD)
    back = time.monotonic()
    ended = first.wait_for("goes on there", back, limit=3 * LIMIT)
    print(f"cut off for {back - cut:.0f} s; the first process ends {ended - back:.0f} s after it is back")
    second.wait_for(f"iteration {ITERATIONS - 1} done")

    def states() -> str:
        return control.run(["prefect", "flow-run", "ls"], server | {"COLUMNS": "200"}).stdout  # else they are cut off

    wait_until(lambda: "RUNNING" not in states(), "the end of the flow run")
    assert "COMPLETED" in states() and "FAILED" not in states() and "CRASHED" not in states(), states()
    assert check_complete(cluster) == ITERATIONS
    assert {row["owner"] for row in query(cluster, "select owner from commits")} == {1, 2}
    wait_until(lambda: not any(services(node) for node in cluster.nodes), "the end of all services")
