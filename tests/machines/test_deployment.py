"""A deployment on machines: Prefect's server on one, its worker on another, services on the nodes of a Ray cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import pytest
from waiting import wait_until

from machines.bed import NETWORK, OUTPUT, ROOT, Machine, Machines
from machines.clusters import start_ray

SCRIPT: Final = str(ROOT / "deployments" / "ray" / "worker.sh")
AREALFLOW: Final = (sys.executable, "-c", "from flows.cli.main import main; main()")
OVERRIDES: Final = (
    *("launcher.type=ray", f"launcher.network={NETWORK}.0/24", "rollout.workers=2"),
    *("model.warm_start=", "model.scratch={}", "schedule.iterations=2"),
)


@pytest.mark.slow("Ray's and Prefect's daemons, and a run of a minute")
def test_a_deployment_runs_on_a_ray_cluster() -> None:
    with Machines("control", "worker", "node1", "node2", s3=True) as bed:
        control, worker = bed["control"], bed["worker"]
        address, api = f"{control.address}:6379", f"http://{control.address}:4200/api"
        start_ray(control, "--head", "--num-cpus=0", "--include-dashboard=false")
        for name in ("node1", "node2"):
            start_ray(bed[name], f"--address={address}", "--num-cpus=3", **bed.s3)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        control.popen(["prefect", "server", "start", "--host", control.address], **silent)
        flows = {"PREFECT_API_URL": api, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), **bed.s3}
        wait_until(lambda: answers(worker, flows), "Prefect's server")
        worker.run(["prefect", "work-pool", "create", "arealflow", "--type", "process"], flows)
        worker.run([*AREALFLOW, "deploy", "quickstart"], flows)

        own = [f"--node-ip-address={worker.address}", "--object-store-memory=80000000", "--disable-usage-stats"]
        script = worker.popen([SCRIPT, *own], flows, **OUTPUT)
        asked = ["--watch", "--param", "run=mine", "--param", f"overrides={' '.join(OVERRIDES)}"]
        control.run(["prefect", "deployment", "run", "rlhf/quickstart", *asked], {"PREFECT_API_URL": api})
        script.terminate()
        printed, _ = script.communicate()
        hosts = dict(re.findall(r"service (\S+) starts on (\S+)", printed))
        assert hosts.keys() == {"trainer", "inference-0", "rollout-0", "rollout-1", "rollout-evaluation"}, printed
        assert set(hosts.values()) == {"node1", "node2"}
        assert "mine: sound" in worker.run([*AREALFLOW, "audit", "mine"], flows).stdout
        wait_until(lambda: "raylet" not in worker.run(["ps", "-eo", "args"]).stdout, "the end of Ray on the worker")


def answers(machine: Machine, environment: Mapping[str, str]) -> bool:
    """Whether Prefect's server can be reached from a machine."""
    return machine.run(["prefect", "work-pool", "ls"], environment, check=False).returncode == 0
