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
    """A process we started: its id, and when it started, so that a reused id is never mistaken for it."""

    pid: int
    created: float


def started(pid: int) -> Started:
    """The process of that id. Raises psutil.NoSuchProcess."""
    return Started(pid, _created(pid))


def _created(pid: int) -> float:
    """When a process started; on Linux in clock ticks since boot, which no setting of the clock changes."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return psutil.Process(pid).create_time()


@dataclass(frozen=True)
class Machine:
    """What runs on this machine; kept in `<home>/up.json`, which the keeper renews when it restarts something."""

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

    Does nothing that is done already.
    """
    from flows.cli.deploy import deployment_names, tell_commands, tell_of_namesakes  # which reads this module

    names = deployment_names(recipes or [])  # before anything is started
    tell_of_namesakes()
    machine = start(port, recipes or [])
    tell_commands(names, machine.api_url)
    typer.echo(f"Prefect UI: {ui_url(machine)}")


def down() -> None:
    """Stop the worker, its flow runs and the Prefect server. The store stays."""
    with alone():
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
    last_look().unlink(missing_ok=True)  # what crashes from here on is not to be run again by the next `up`
    typer.echo("stopped")


def start(port: int = DEFAULT_PORT, recipes: Sequence[str] = ()) -> Machine:
    """Server, worker, keeper and deployments; those that run already are kept."""
    with alone():
        machine = _start(port)
        _deploy(machine.api_url, recipes)
    return machine


def _start(port: int) -> Machine:
    machine = running()
    if machine is None:
        if read() is not None or parts():
            _stop_all()  # half of it may still run, or an `up` was killed before it had written anything down
        machine = _server_and_worker(port)
    if not alive(machine.keeper):
        _stop_parts("keeper")  # one that was started and not written down: two would start everything twice
        machine = replace(machine, keeper=_spawn("keeper", python(KEEPER), machine.api_url))
        write(machine)
    return machine


def _deploy(api_url: str, recipes: Sequence[str]) -> None:
    """What prefect.yaml in this folder names, and these recipes."""
    from flows.cli.deploy import deploy_recipes  # which reads this module

    wait_for_api(api_url)
    if Path("prefect.yaml").exists():
        typer.echo("deploying prefect.yaml")
        prefect(["--no-prompt", "deploy", "--all"], api_url)
    if recipes:
        deploy_recipes(recipes, api_url)
    elif not Path("prefect.yaml").exists():
        typer.echo("nothing is deployed: there is no prefect.yaml here, and no recipe is named (arealflow deploy)")


def _server_and_worker(port: int) -> Machine:
    """Both, written down. The server gets another port if somebody else took its own while it was starting."""
    port = free_port(port)
    api_url = f"http://127.0.0.1:{port}/api"
    typer.echo(f"starting the Prefect server on port {port}")
    server = start_server(api_url)
    try:
        machine = Machine(api_url, server, start_worker(api_url, server))
        write(machine)
    except BaseException as error:  # an interrupt too: `down` knows only what is written down
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
def alone() -> Iterator[None]:
    """Held by one `up` or `down` of this home at a time: what one starts is written down before the next one looks."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "up.lock").open("ab") as lock:  # closed, and so released, even where the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            typer.echo("waiting for another `arealflow up` or `down` to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_server(api_url: str) -> Started:
    """A Prefect server that listens where `api_url` says. It does not answer yet: see `_wait_for`."""
    port = str(urlsplit(api_url).port)
    return _spawn("server", _command(["server", "start", "--host", "127.0.0.1", "--port", port]), api_url)


def start_worker(api_url: str, server: Started) -> Started:
    """The worker, once the server answers and has a work pool and the automations for it."""
    from flows.cli.automations import install  # PyYAML: not for commands that need none

    _wait_for(api_url, server)
    prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], api_url)
    install(api_url)
    return spawn_worker(api_url)


def spawn_worker(api_url: str) -> Started:
    return _spawn("worker", python(WORKER), api_url)


def running() -> Machine | None:
    """What `up` has started, if its keeper or both server and worker still run; else None. Changes nothing."""
    machine = read()
    if machine is None:
        return None
    whole = alive(machine.keeper) or (alive(machine.server) and alive(machine.worker))
    return machine if whole else None


def named_server() -> str:
    """The API of the Prefect server that PREFECT_API_URL names, else that of `up`; empty without either."""
    if named := os.environ.get("PREFECT_API_URL"):
        return named
    machine = running()
    return machine.api_url if machine is not None else ""


def _cancel_flow_runs(machine: Machine) -> None:
    """Have the worker end its flow runs, so that they are seen to be cancelled and not to have crashed."""
    from flows.cli.upkeep import stop_flow_runs  # which reads this module

    seconds = CANCEL_SECONDS if alive(machine.worker) or alive(machine.keeper) else 0.0  # who would end them?
    try:
        stop_flow_runs(machine.api_url, "Stopped by `arealflow down`. Retry it to have it go on.", seconds)
    except (httpx.HTTPError, ValueError, LookupError) as error:  # they end with the worker in any case
        why = str(error) or type(error).__name__
        typer.echo(f"the Prefect server does not answer as it should ({why}): its flow runs are ended")


def _stop_all() -> None:
    """End the keeper, which would start the others again; then those, as the keeper has last written them down.

    What is not written down is ended too, and flow processes whose worker has died: nobody else would.
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
    """End those parts of that name that still run, which nobody has written down."""
    for pid, part in parts().items():
        if part == name:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(started(pid), family=name != "keeper")


def _end_flows() -> None:
    from flows.cli.keeper import FLOW_GRACE_SECONDS, ask_flows_to_end, kill  # which reads this module

    kill(ask_flows_to_end(), FLOW_GRACE_SECONDS)


def alive(started: Started | None) -> bool:
    return started is not None and _process(started) is not None


def ui_url(machine: Machine) -> str:
    return machine.api_url.removesuffix("/api")


def state_file() -> Path:
    return home() / "up.json"


def read() -> Machine | None:
    """What is written down; None if nothing is."""
    try:
        values = json.loads(state_file().read_text())
    except FileNotFoundError:
        return None
    keeper = values.get("keeper")
    server, worker = Started(**values["server"]), Started(**values["worker"])
    return Machine(values["api_url"], server, worker, Started(**keeper) if keeper else None)


def write(machine: Machine) -> None:
    """Write down what runs; whoever reads meanwhile sees the old or the new."""
    partial = state_file().with_name(f".up.json.{uuid.uuid4().hex}")
    try:
        partial.write_text(json.dumps(asdict(machine)))
        partial.replace(state_file())
    finally:
        partial.unlink(missing_ok=True)


def free_port(first: int) -> int:
    """The first port from `first` on that nothing listens on; says so when it is not `first`."""
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
    """For everything that talks to our server: its address, and where our files lie."""
    store = {"AREALFLOW_STORE": store_url(named)} if (named := os.environ.get("AREALFLOW_STORE")) else {}
    return {
        **os.environ,
        **store,  # absolute: flow runs have other current folders
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
    """The command that runs a module: -P, since a folder of the current one may have the name of one of ours."""
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
    """Whether a server that `believe` trusts answers before START_SECONDS have passed or `give_up` says so."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and not give_up():
        with contextlib.suppress(httpx.TransportError):
            if believe() and httpx.get(f"{api_url}/health", timeout=2).is_success:
                return True
        time.sleep(0.2)
    return False


def listens(started: Started, port: int) -> bool:
    """Whether that process, or one below it, is who listens on the port: another's server may answer there."""
    process = _process(started)
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            sockets = one.net_connections("tcp")
            if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
                return True
    return False


def _wait_for(api_url: str, server: Started) -> None:
    port = urlsplit(api_url).port or 80
    if wait_for_api(api_url, lambda: not alive(server), lambda: listens(server, port)):
        return
    raise UserError(f"the Prefect server did not start; {last_lines(home() / 'logs' / 'server.log')}")


def stop(started: Started, grace_seconds: float = 15.0, family: bool = True) -> None:
    """End a process of ours, with everything below it unless `family` is False."""
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
