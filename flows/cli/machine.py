"""`arealflow up` and `down`: a Prefect server, a worker, their keeper and the deployments on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import psutil
import typer

from areal_tasks.engines.ports import loopback_port
from areal_tasks.store.backend import store_url
from flows.cli.strays import PART, parts
from flows.home import home, last_lines
from schemas.errors import UserError

POOL = "arealflow"
DEFAULT_PORT = 4200
START_SECONDS = 120.0
CANCEL_SECONDS = 15.0
KEEPER = "flows.cli.keeper"
WORKER = "flows.worker"


@dataclass(frozen=True)
class Started:
    """A process we started: its id, and its start time, which distinguishes it from a later process of the same id."""

    pid: int
    created: float


def started(pid: int) -> Started:
    """The process with that id. Raises psutil.NoSuchProcess."""
    return Started(pid, _created(pid))


def _created(pid: int) -> float:
    """When a process started; on Linux in clock ticks since boot, which clock adjustments do not change."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return psutil.Process(pid).create_time()


@dataclass(frozen=True)
class Machine:
    """The processes of `up`, as `<home>/up.json` lists them; the keeper updates it when it restarts one."""

    api_url: str
    server: Started
    worker: Started
    keeper: Started | None = None


def up(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE…]", help="Recipes to deploy, as `arealflow deploy` does.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the Prefect server; the next free one is taken.")] = DEFAULT_PORT,
) -> None:
    """Start a Prefect server, a worker and their keeper; deploy recipes, and prefect.yaml where there is one.

    Processes that run already are kept.
    """
    from flows.cli.deploy import deployment_names, print_commands, warn_of_namesakes  # here: it imports this module

    names = deployment_names(recipes or [])  # before anything is started
    warn_of_namesakes()
    machine = start(port, recipes or [])
    print_commands(names, machine.api_url)
    typer.echo(f"Prefect UI: {ui_url(machine)}")


def down() -> None:
    """Stop the worker, its flow runs, the keeper and the Prefect server. The store stays."""
    with up_lock():
        _down()


def _down() -> None:
    from flows.cli.upkeep import flow_processes, last_look

    machine = read()
    if machine is None and not flow_processes() and not parts():
        typer.echo("nothing is running")
        return
    if machine is not None:
        _cancel_flow_runs(machine)
    _stop_all()
    last_look().unlink(missing_ok=True)  # the next `up` must not retry flow runs that crash from here on
    typer.echo("stopped")


def start(port: int = DEFAULT_PORT, recipes: Sequence[str] = ()) -> Machine:
    """Start server, worker and keeper, keeping those that run, and deploy recipes."""
    with up_lock():
        machine = _start(port)
        _deploy(machine.api_url, recipes)
    return machine


def _start(port: int) -> Machine:
    machine = running()
    if machine is None:
        if read() is not None or parts():
            _stop_all()  # some parts may still run, or an `up` was killed before it wrote up.json
        machine = _server_and_worker(port)
    if not alive(machine.keeper):
        _stop_parts("keeper")  # one missing from up.json: two keepers would start everything twice
        machine = replace(machine, keeper=_spawn("keeper", python(KEEPER), machine.api_url))
        write(machine)
    return machine


def _deploy(api_url: str, recipes: Sequence[str]) -> None:
    """Deploy the prefect.yaml of this folder, if there is one, and these recipes."""
    from flows.cli.deploy import deploy_recipes  # here: it imports this module

    wait_for_api(api_url)
    if Path("prefect.yaml").exists():
        typer.echo("deploying prefect.yaml")
        prefect(["--no-prompt", "deploy", "--all"], api_url)
    if recipes:
        deploy_recipes(recipes, api_url)
    elif not Path("prefect.yaml").exists():
        typer.echo("nothing is deployed: there is no prefect.yaml here, and no recipe is named (arealflow deploy)")


def _server_and_worker(port: int) -> Machine:
    """Start both and write up.json. If another process takes the port meanwhile, retry with the next one."""
    port = free_port(port)
    api_url = f"http://127.0.0.1:{port}/api"
    typer.echo(f"starting the Prefect server on port {port}")
    server = start_server(api_url)
    try:
        machine = Machine(api_url, server, start_worker(api_url, server))
        write(machine)
    except BaseException as error:  # also an interrupt: `down` reads up.json
        stop(server)
        if isinstance(error, UserError) and _answers(port):
            return _server_and_worker(port + 1)
        raise
    return machine


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def up_lock() -> Iterator[None]:
    """A lock of this home, held by one `up` or `down` at a time, so that the next one reads a complete up.json."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "up.lock").open("ab") as lock:  # closed, and so released, even if the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            typer.echo("waiting for another `arealflow up` or `down` to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_server(api_url: str) -> Started:
    """Start a Prefect server at `api_url`. It does not answer yet: see `_wait_for`."""
    port = str(urlsplit(api_url).port)
    return _spawn("server", _command(["server", "start", "--host", "127.0.0.1", "--port", port]), api_url)


def start_worker(api_url: str, server: Started) -> Started:
    """Wait for the server, create its work pool and automations, and start the worker."""
    from flows.cli.automations import install  # here: PyYAML, which few commands need

    _wait_for(api_url, server)
    prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], api_url)
    install(api_url)
    return spawn_worker(api_url)


def spawn_worker(api_url: str) -> Started:
    return _spawn("worker", python(WORKER), api_url)


def running() -> Machine | None:
    """What `up` started, if the keeper, or both server and worker, still run; else None. Changes nothing."""
    machine = read()
    if machine is None:
        return None
    whole = alive(machine.keeper) or (alive(machine.server) and alive(machine.worker))
    return machine if whole else None


def named_server() -> str:
    """The API URL in PREFECT_API_URL, else that of `up`'s server; empty without either."""
    if named := os.environ.get("PREFECT_API_URL"):
        return named
    machine = running()
    return machine.api_url if machine is not None else ""


def _cancel_flow_runs(machine: Machine) -> None:
    """Cancel the flow runs through the worker, so that they end as cancelled, not as crashed."""
    from flows.cli.upkeep import stop_flow_runs  # here: it imports this module

    seconds = CANCEL_SECONDS if alive(machine.worker) or alive(machine.keeper) else 0.0  # 0: no process ends them
    try:
        stop_flow_runs(machine.api_url, "Stopped by `arealflow down`. Retry it to resume it.", seconds)
    except (httpx.HTTPError, ValueError, LookupError) as error:  # they end with the worker in any case
        why = str(error) or type(error).__name__
        typer.echo(f"the Prefect server cannot cancel its flow runs ({why}): they are ended with the worker")


def _stop_all() -> None:
    """End the keeper, which would restart the others, then the worker and server of the up.json that it wrote last.

    Also ends parts that are missing from up.json, and flow processes whose worker died.
    """
    machine = read()
    if machine is not None and machine.keeper is not None:
        stop(machine.keeper, family=False)
    _stop_parts("keeper")
    machine = read()
    if machine is not None:
        stop(machine.worker)
    _stop_parts("worker")
    _end_flows()
    if machine is not None:
        stop(machine.server)
    _stop_parts("server")
    state_file().unlink(missing_ok=True)


def _stop_parts(name: str) -> None:
    """End all running parts of that name, whether listed in up.json or not."""
    for pid, part in parts().items():
        if part == name:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(started(pid), family=name != "keeper")


def _end_flows() -> None:
    from flows.cli.keeper import FLOW_GRACE_SECONDS, ask_flows_to_end, kill  # here: it imports this module

    kill(ask_flows_to_end(), FLOW_GRACE_SECONDS)


def alive(started: Started | None) -> bool:
    return started is not None and _process(started) is not None


def ui_url(machine: Machine) -> str:
    return machine.api_url.removesuffix("/api")


def state_file() -> Path:
    return home() / "up.json"


def read() -> Machine | None:
    """The content of up.json; None if it does not exist."""
    try:
        values = json.loads(state_file().read_text())
    except FileNotFoundError:
        return None
    keeper = values.get("keeper")
    server, worker = Started(**values["server"]), Started(**values["worker"])
    return Machine(values["api_url"], server, worker, Started(**keeper) if keeper else None)


def write(machine: Machine) -> None:
    """Replace up.json atomically: a concurrent reader sees the old or the new content."""
    partial = state_file().with_name(f".up.json.{uuid.uuid4().hex}")
    try:
        partial.write_text(json.dumps(asdict(machine)))
        partial.replace(state_file())
    finally:
        partial.unlink(missing_ok=True)


def free_port(first: int) -> int:
    """The first free port from `first` on; prints a line if it is not `first`."""
    for port in range(first, first + 50):
        try:
            loopback_port(port)
        except OSError:
            continue
        if port != first:
            typer.echo(f"port {first} is taken; using {port}")
        return port
    raise UserError(f"ports {first} to {first + 49} are all taken; name another with --port")


def environment(api_url: str) -> dict[str, str]:
    """The environment of processes that use our Prefect server: its API URL, and our folders."""
    store = {"AREALFLOW_STORE": store_url(named)} if (named := os.environ.get("AREALFLOW_STORE")) else {}
    return {
        **os.environ,
        **store,  # absolute, since flow runs have other working directories
        "AREALFLOW_HOME": str(home()),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONUNBUFFERED": "1",
    }


def prefect(arguments: Sequence[str], api_url: str, folder: Path | None = None) -> None:
    """Run a Prefect command, in another folder if one is given. UserError with its output if it fails."""
    done = subprocess.run(_command(arguments), cwd=folder, env=environment(api_url), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"prefect {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _command(arguments: Sequence[str]) -> list[str]:
    return [*python("prefect"), *arguments]


def python(module: str) -> list[str]:
    """The command that runs a module; with -P, since the current folder may contain packages named like ours."""
    return [sys.executable, "-P", "-m", module]


def _spawn(name: str, command: Sequence[str], api_url: str) -> Started:
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            env=environment(api_url) | {PART: name},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return started(process.pid)


def wait_for_api(
    api_url: str, give_up: Callable[[], bool] = lambda: False, believe: Callable[[], bool] = lambda: True
) -> bool:
    """Whether a server answers, and `believe` holds, before START_SECONDS have passed or `give_up` holds."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and not give_up():
        with contextlib.suppress(httpx.TransportError):
            if believe() and httpx.get(f"{api_url}/health", timeout=2).is_success:
                return True
        time.sleep(0.2)
    return False


def listens(started: Started, port: int) -> bool:
    """Whether that process or a descendant listens on the port, rather than another user's server."""
    process = _process(started)
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in (process, *process.children(recursive=True)):
            sockets = member.net_connections("tcp")
            if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
                return True
    return False


def _wait_for(api_url: str, server: Started) -> None:
    port = urlsplit(api_url).port or 80
    if wait_for_api(api_url, lambda: not alive(server), lambda: listens(server, port)):
        return
    raise UserError(f"the Prefect server did not start; {last_lines(home() / 'logs' / 'server.log')}")


def stop(started: Started, grace_seconds: float = 15.0, family: bool = True) -> None:
    """End a process of ours, with its descendants unless `family` is False."""
    process = _process(started)
    if process is None:
        return
    doomed = [process, *(process.children(recursive=True) if family else [])]
    process.terminate()
    _, left_alive = psutil.wait_procs(doomed, grace_seconds)
    for left in left_alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(left_alive, 5)


def _process(started: Started) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(started.pid)
        if _created(started.pid) == started.created and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None
