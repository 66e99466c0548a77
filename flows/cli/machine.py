"""`arealflow up` and `down`: a Prefect server, a worker and the deployments on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from flows.home import home
from schemas.errors import UserError

POOL = "arealflow"
DEFAULT_PORT = 4200
START_SECONDS = 120.0


@dataclass(frozen=True)
class Started:
    """A process we started: its id, and its start time so that a reused id is never mistaken for it."""

    pid: int
    created: float


@dataclass(frozen=True)
class Machine:
    """What runs on this machine; kept in `<home>/up.json`."""

    api_url: str
    server: Started
    worker: Started


def up(
    port: Annotated[int, typer.Option(help="Port of the Prefect server; the next free one is taken.")] = DEFAULT_PORT,
) -> None:
    """Start a Prefect server and a worker, and deploy everything in prefect.yaml. Does nothing that is done already."""
    machine = start(port)
    typer.echo(f"Prefect UI: {ui_url(machine)}")
    if machine.api_url != f"http://127.0.0.1:{DEFAULT_PORT}/api":
        typer.echo(f"For the prefect command in this shell: export PREFECT_API_URL={machine.api_url}")


def down() -> None:
    """Stop the worker, its flow runs and the Prefect server. The store stays."""
    machine = running()
    if machine is None:
        typer.echo("nothing is running")
        return
    for process in (machine.worker, machine.server):
        stop(process)
    state_file().unlink()
    typer.echo("stopped")


def start(port: int = DEFAULT_PORT) -> Machine:
    """Server, worker and deployments; those that run already are kept."""
    machine = running()
    if machine is None:
        port = free_port(port)
        api_url = f"http://127.0.0.1:{port}/api"
        typer.echo(f"starting the Prefect server on port {port}")
        server = _spawn("server", ["server", "start", "--host", "127.0.0.1", "--port", str(port)], api_url)
        try:
            machine = Machine(api_url, server, _start_worker(api_url, server))
            state_file().write_text(json.dumps(asdict(machine)))
        except BaseException:  # an interrupt too: `down` knows only what is written down
            stop(server)
            raise
    typer.echo("deploying prefect.yaml")
    prefect(["--no-prompt", "deploy", "--all"], machine.api_url)
    return machine


def _start_worker(api_url: str, server: Started) -> Started:
    """The worker, once the server answers and has a work pool for it."""
    _wait_for(api_url, server)
    prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], api_url)
    return _spawn("worker", ["worker", "start", "--pool", POOL, "--name", "local"], api_url)


def running() -> Machine | None:
    """What `up` has started and what still runs; None unless all of it does (then the rest is stopped)."""
    if not state_file().exists():
        return None
    values = json.loads(state_file().read_text())
    machine = Machine(values["api_url"], Started(**values["server"]), Started(**values["worker"]))
    if all(_process(p) for p in (machine.server, machine.worker)):
        return machine
    for process in (machine.worker, machine.server):
        stop(process)
    state_file().unlink()
    return None


def ui_url(machine: Machine) -> str:
    return machine.api_url.removesuffix("/api")


def state_file() -> Path:
    return home() / "up.json"


def free_port(first: int) -> int:
    """The first port from `first` on that nothing listens on; says so when it is not `first`."""
    for port in range(first, first + 50):
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _binds(probe, port):
                if port != first:
                    typer.echo(f"port {first} is taken; using {port}")
                return port
    raise UserError(f"ports {first} to {first + 49} are all taken; name another with --port")


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def environment(api_url: str) -> dict[str, str]:
    """For everything that talks to our server: its address, and where our files lie."""
    return {
        **os.environ,
        "AREALFLOW_HOME": str(home()),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONUNBUFFERED": "1",
    }


def prefect(arguments: Sequence[str], api_url: str) -> None:
    """Run a Prefect command. UserError with its output if it fails."""
    done = subprocess.run(_command(arguments), env=environment(api_url), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"prefect {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def _spawn(name: str, arguments: Sequence[str], api_url: str) -> Started:
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            _command(arguments),
            env=environment(api_url),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process.pid, psutil.Process(process.pid).create_time())


def _wait_for(api_url: str, server: Started) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{api_url}/health", timeout=2).is_success:
                return
        if _process(server) is None:
            break
        time.sleep(0.2)
    log = home() / "logs" / "server.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise UserError(f"the Prefect server did not start; last lines of {log}:\n{tail}")


def stop(started: Started, grace_seconds: float = 15.0) -> None:
    """End a process of ours with everything below it."""
    process = _process(started)
    if process is None:
        return
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, grace_seconds)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, 5)


def _process(started: Started) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(started.pid)
        if process.create_time() == started.created and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None
