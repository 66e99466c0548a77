"""`arealflow up` and `down`: a Prefect server, a worker, their keeper and the deployments on this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import psutil
import typer

from areal_tasks.engines.ports import probe_port
from areal_tasks.processes import alive
from flows.cli import automations, processes
from flows.cli.keeper import server_command, since_file, stop_flow_runs
from flows.cli.output import echo
from flows.cli.processes import end, flow_processes, parts, python, running, spawn
from flows.cli.projects import deploy_all, deployment_names, print_commands, warn_of_namesakes
from flows.home import home, last_lines
from schemas.errors import UserError

DEFAULT_PORT = 4200
CANCEL_SECONDS = 15.0
KEEPER = "flows.cli.keeper"
#: What `up` says with the names of variables, whose values may be secrets.
OTHER_ENVIRONMENT = (
    "what runs already keeps the environment of an earlier `arealflow up`, and so do flow runs; this shell has other "
    "values of {}. To use them: `arealflow down`, which stops flow runs, then `arealflow up`"
)


def up(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE…]", help="Recipes to deploy, as `arealflow deploy` does.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port of the Prefect server; if it is in use, the next free one.")
    ] = DEFAULT_PORT,
) -> None:
    """Start a Prefect server, a worker and their keeper; deploy recipes, and prefect.yaml where there is one.

    Processes that run already are kept.
    """
    names = deployment_names(recipes or [])  # before anything is started
    warn_of_namesakes()
    api_url = start(port, recipes or [])
    print_commands(names, api_url)
    echo(f"Prefect UI: {api_url.removesuffix('/api')}")
    # Where it may be a log, the output does not hold the password.
    echo(f"its password: {os.environ[processes.LOGIN] if sys.stdout.isatty() else processes.login_file()}")


def down() -> None:
    """Stop the worker, its flow runs, the keeper and the Prefect server. The store stays."""
    with _lock():
        if not parts("server", "worker", "keeper") and not flow_processes():
            echo("nothing is running")
            return
        if api_url := running():  # flow runs end as cancelled through the worker, not as crashed
            processes.log_in()
            seconds = CANCEL_SECONDS if parts("worker", "keeper") else 0.0  # 0: no process ends them
            try:
                stop_flow_runs(api_url, "Stopped by `arealflow down`. Retry it to resume it.", seconds)
            except (httpx.HTTPError, ValueError, LookupError) as error:  # they end with the worker in any case
                echo(f"{processes.why(api_url, error)}. Its flow runs are not cancelled, but end with the worker")
        _end_all()
        since_file().unlink(missing_ok=True)  # the next `up` must not retry flow runs that crash from here on
        echo("stopped")


def start(port: int = DEFAULT_PORT, recipes: Sequence[str] = ()) -> str:
    """Start server and keeper, which starts the worker, keeping those that run; deploy recipes. Returns the API URL."""
    with _lock():
        if api_url := running():
            processes.log_in()
        else:
            _end_all()  # a worker or flow processes may have outlived keeper and server
            api_url = start_server(port)
        if not answers(api_url):
            raise _not_started()
        automations.install(api_url)
        if not parts("keeper"):  # last: it and the worker keep this environment, also if the server has refused it
            spawn("keeper", python(KEEPER), api_url)
        if kept := processes.kept_variables(api_url):
            echo(f"note: {OTHER_ENVIRONMENT.format(', '.join(kept))}", err=True)
        deploy_all(recipes, api_url)
    return api_url


def start_server(port: int) -> str:
    """Start a Prefect server; its API URL once it answers. Uses the next port if another process takes this one."""
    port = free_port(port)
    api_url = f"http://127.0.0.1:{port}/api"
    echo(f"starting the Prefect server on port {port}")
    processes.make_login()
    server = spawn("server", server_command(api_url), api_url)
    if answers(api_url, server):
        return api_url
    end([server])
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return start_server(port + 1)
    raise _not_started()


def answers(api_url: str, server: psutil.Process | None = None) -> bool:
    """Whether our Prefect server answers before START_SECONDS have passed, or `server`, if it is given, ends."""
    deadline, port = time.monotonic() + processes.START_SECONDS, urlsplit(api_url).port
    while time.monotonic() < deadline and (server is None or alive(server)):
        with suppress(httpx.TransportError, psutil.NoSuchProcess):
            ours = any(listens(one, port) for one in parts("server"))
            if ours and httpx.get(f"{api_url}/health", timeout=2).is_success:
                return True
        time.sleep(0.2)
    return False


def listens(process: psutil.Process, port: int | None) -> bool:
    """Whether that process listens on the port, rather than another user's server."""
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in process.net_connections("tcp"))


def _not_started() -> UserError:
    return UserError(f"the Prefect server did not start; {last_lines(home() / 'logs' / 'server.log')}")


def free_port(first: int) -> int:
    """The first free port from `first` on; prints a line if it is not `first`."""
    for port in range(first, first + 50):
        try:
            probe_port(port)
        except OSError:
            continue
        if port != first:
            echo(f"port {first} is taken; using {port}")
        return port
    raise UserError(f"ports {first} to {first + 49} are all taken; name another with --port")


def _end_all() -> None:
    """End the keeper first, which would restart the others, and the server last: ending flow runs report to it."""
    end(parts("keeper"))
    end(parts("worker"))
    end(flow_processes())
    end(parts("server"))


@contextmanager
def _lock() -> Iterator[None]:
    """A lock of this home, held by one `up` or `down` at a time."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "up.lock").open("ab") as lock:  # closed, and so released, even if the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            echo("waiting for another `arealflow up` or `down` to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
