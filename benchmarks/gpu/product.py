"""Runs through the product: Prefect server, worker, `prefect deployment run`, and the run's own tables afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.paths import iteration_commit
from areal_tasks.store.query import run_sql
from flows.cli.automations import ask
from flows.cli.machine import start
from flows.cli.processes import environment, named_server
from flows.cli.projects import prefect

ENDED: Final = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
ROOT: Final = Path(__file__).resolve().parents[2]


def start_machine(home: Path, extra: str = "") -> str:
    """Server, worker and deployments, with their files under `home`; `extra`: a further prefect.yaml to deploy."""
    os.chdir(ROOT)
    os.environ["AREALFLOW_HOME"] = str(home)
    folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(f for f in folders if f))  # own verifiers are found there
    api_url = start()
    if extra:
        prefect(["--no-prompt", "deploy", "--all", "--prefect-file", extra], api_url)
    return api_url


def deploy_run(api_url: str, deployment: str, run: str, overrides: Mapping[str, object]) -> str:
    """`prefect deployment run` with these overrides; the id of the flow run."""
    return create(api_url, deployment, run, shlex.join(f"{key}={value}" for key, value in overrides.items()))


def create(api_url: str, deployment: str, run: str, overrides: str) -> str:
    """`prefect deployment run`; the id of the flow run."""
    quoted = json.dumps(overrides)  # as it is, Prefect takes a text with a brace or a quote for broken JSON
    command = ["deployment", "run", deployment, "--param", f"run={run}", "--param", f"overrides={quoted}"]
    print(f"$ prefect {' '.join(command)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *command], env=environment(api_url), capture_output=True, text=True
    )
    found = re.search(r"UUID: (\S+)", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"the flow run could not be created:\n{done.stdout}{done.stderr}")
    return found[1]


def state(api_url: str, flow_run: str) -> str:
    """The flow run's state; empty while the server does not answer."""
    with contextlib.suppress(httpx.TransportError):
        answer = ask("GET", f"{api_url}/flow_runs/{flow_run}").raise_for_status()
        return str(answer.json()["state_type"])
    return ""


def follow(
    api_url: str, flow_runs: Mapping[str, str], deadline: float, tell: Callable[[], str], first: bool = False
) -> dict[str, str]:
    """The last state of each flow run (name -> id) once all have ended, or at the deadline (monotonic seconds).

    `first`: as soon as one has ended. What `tell` says is printed whenever it changes.
    """
    said, states = "", dict.fromkeys(flow_runs, "")
    enough = any if first else all
    while time.monotonic() < deadline:
        states = {name: state(api_url, flow_run) for name, flow_run in flow_runs.items()}
        if (news := tell()) != said:
            said = news
            print(f"{time.strftime('%H:%M:%S')} {said}", flush=True)
        if enough(s in ENDED for s in states.values()):
            break
        time.sleep(1.0)
    return states


def committed(store: Store, run: str, known: int = 0) -> int:
    """Iterations of a run that are committed; `known` of them need no look."""
    while store.exists(iteration_commit(run, known)):
        known += 1
    return known


def rows(store: Store, run: str, query: str) -> list[dict[str, Any]]:
    """The answer to a question in SQL."""
    found: list[dict[str, Any]] = run_sql(store, run, query).to_pylist()
    return found


def show_failure(home: Path, run: str) -> None:
    """The ends of the logs that say why a run failed."""
    logs = [home / "logs" / "worker.log", *sorted((home / "logs" / run).glob("*.log"))]
    for log in logs:
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()[-25:]
            print(f"── {log}", *lines, sep="\n", flush=True)


def write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1, default=str))


def main() -> None:
    """`python -m benchmarks.gpu.product DEPLOYMENT RUN "OVERRIDES"`: run it on a machine that is up, to its end."""
    deployment, run, overrides = sys.argv[1:]
    api_url = named_server()
    if not api_url:
        raise SystemExit("nothing is running: arealflow up")
    flow_run = create(api_url, deployment, run, overrides)
    store = open_store("")
    ended = follow(api_url, {run: flow_run}, time.monotonic() + 540, lambda: f"{committed(store, run)} iterations")[run]
    print(f"flow run {flow_run} of run {run}: {ended or 'still at work'}", flush=True)
    if ended != "COMPLETED":
        show_failure(Path(os.environ["AREALFLOW_HOME"]), run)
        sys.exit(1)


if __name__ == "__main__":
    main()
