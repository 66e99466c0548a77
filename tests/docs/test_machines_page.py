"""The cluster system of the page on several machines, and the files for clusters and containers in `deployments`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_documentation import ROOT, blocks
from waiting import wait_until

from areal_tasks.launchers.cluster import Cluster, Resources, Task
from schemas.recipe.launcher import Launcher

#: Runs the command here, without the page's file of keys.
SSH = '#!/bin/sh\nfor command; do :; done\nexec sh -c "${command#*; . /etc/arealflow.env; }"\n'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    [code] = blocks(ROOT / "docs" / "guides" / "machines.md", "python")
    (tmp_path / "my_cluster.py").write_text(code)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MACHINES", "node1 node2")
    spec = importlib.util.spec_from_file_location("my_cluster", tmp_path / "my_cluster.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Cluster = module.Machines(Launcher())
    return found


def test_the_cluster_system_of_the_page_runs_tasks(cluster: Cluster, tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WORD']); sys.exit(3)"
    task = Task("one", (sys.executable, "-c", code), {"WORD": "a 'b' $c"}, Resources(), tmp_path / "one.out")
    submitted = cluster.submit(task)
    assert wait_until(submitted.exit_code, "its end") == 3
    assert task.output.read_text() == "a 'b' $c\n"
    assert submitted.waiting() == ""


def test_the_cluster_system_of_the_page_ends_tasks(cluster: Cluster, tmp_path: Path) -> None:
    submitted = cluster.submit(Task("one", ("sleep", "1000"), {}, Resources(), tmp_path / "one.out"))
    assert submitted.exit_code() is None
    cluster.close()
    assert submitted.exit_code() is not None


def test_the_script_for_slurm_is_one(tmp_path: Path) -> None:
    script = ROOT / "deployments" / "slurm" / "flow.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        assert subprocess.run([shellcheck, str(script)], check=False).returncode == 0
    unnamed = subprocess.run(["bash", str(script), "file", "quickstart"], capture_output=True, text=True, check=False)
    assert unnamed.stderr == "flow.sbatch: name the run: run=NAME\n"


def test_what_the_containers_name_exists() -> None:
    folder = ROOT / "deployments" / "containers"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    services = compose["services"]
    assert (folder / services["worker"]["build"]["context"] / "pyproject.toml").exists()
    login, server = "${PREFECT_API_AUTH_STRING:?}", services["prefect"]["environment"]
    assert {services[name]["environment"]["PREFECT_API_AUTH_STRING"] for name in ("worker", "deploy")} == {login}
    assert (
        server["PREFECT_SERVER_API_AUTH_STRING"] == login and "*" not in server["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    )
    lines = (folder / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert len(copied) >= 8
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_manifest_for_kuberay_runs_what_the_image_has() -> None:
    cluster, policy = yaml.safe_load_all((ROOT / "deployments" / "ray" / "kuberay.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    assert {one["envFrom"][0]["secretRef"]["name"] for one in containers} == {cluster["metadata"]["name"]}
    assert all("readinessProbe" in one and "livenessProbe" in one for one in containers), "KubeRay's need a dashboard"
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    script = ROOT / Path(containers[-1]["command"][0]).relative_to("/src")
    assert script.stat().st_mode & 0o111, "Kubernetes starts it by its name"
    for one in containers[:-1]:
        echoed = {"KUBERAY_GEN_RAY_START_CMD": """echo start --resources='{"a": 1}' --block""", "PATH": "/usr/bin:/bin"}
        command = [word.replace("65536", "1024").replace("exec ", "") for word in one["command"]]
        done = subprocess.run(command, env=echoed, capture_output=True, text=True, check=True)
        assert done.stdout == 'start --resources={"a": 1} --block\n'
