"""The processes of this home: how they are started, found and ended.

No file lists them. They are found by marks in their environments, which child processes inherit: so nothing can be out
of date, and what a killed `up` or keeper has started is found like everything else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from areal_tasks.processes import alive
from areal_tasks.store.backend import store_url
from flows.home import home, prefect_home
from flows.server import new_login, server_settings
from schemas.errors import UserError

#: Environment variable of each server, worker and keeper that says which it is.
PART: Final = "AREALFLOW_PART"
FLOW_RUN: Final = "PREFECT__FLOW_RUN_ID"
#: Environment variable with `user:password`, which Prefect's client and `automations.ask` show the server.
LOGIN: Final = "PREFECT_API_AUTH_STRING"
POOL: Final = "arealflow"
START_SECONDS = 120.0  # within which a Prefect server answers
REFUSED: Final = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
#: How the names of variables begin that flows and their services read (docs/reference/environment.md).
READ: Final = re.compile(
    "AREAL|AWS_|CUDA_VISIBLE_DEVICES|FSSPEC_|GLOO_|HF_|NCCL_|PREFECT_|PYTHONPATH|PYTORCH_|RAY_|SGLANG_|SSL_CERT_FILE|"
    "TORCHINDUCTOR_|XDG_CACHE_HOME"
)
CREDENTIALS: Final = f"check PREFECT_API_KEY or {LOGIN}"


def parts(*names: str) -> list[psutil.Process]:
    """The running processes of `arealflow up` with these names. Each leads a session, unlike what it has started."""
    found: list[psutil.Process] = []
    for process, values in _marked():
        with suppress(OSError):
            if values.get(PART) in names and FLOW_RUN not in values and os.getsid(process.pid) == process.pid:
                found.append(process)
    return found


def flow_processes() -> dict[psutil.Process, str]:
    """The processes of our flow runs on this machine, services included, each with the id of its flow run."""
    return {process: values[FLOW_RUN] for process, values in _marked() if FLOW_RUN in values}


def _marked() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The running processes of this home, with their environments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            values = process.environ()
            if values.get("AREALFLOW_HOME") == str(home()) and alive(process):
                yield process, values


def end(processes: Collection[psutil.Process], grace_seconds: float = 15.0) -> None:
    """Terminate processes, leaving children of one of them to their parent; kill those that do not end in time."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.parent() not in processes:
                process.terminate()
    _, left = psutil.wait_procs(processes, grace_seconds)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, 5)


def running() -> str:
    """The URL of the API that `up` provides; empty if neither its server runs nor a keeper, which restarts it."""
    return _server_variable("PREFECT_API_URL")


def _server_variable(name: str) -> str:
    """A variable of the environment that `up` gave its server and keeper; empty if neither runs."""
    for process in parts("keeper", "server"):
        with suppress(psutil.Error, OSError):
            return process.environ().get(name, "")
    return ""


def log_in(login: str = "") -> None:
    """Show this login, by default that of `up`'s running server, with each request of this process and its children."""
    os.environ[LOGIN] = login or _server_variable(LOGIN)


def login_file() -> Path:
    """The file from which the user's shells take the login of `up`'s server."""
    return home() / "prefect" / "login"


def make_login() -> None:
    """Log in with a new login, for a server that is to be started. It replaces the one in `login_file`."""
    log_in(new_login())
    file = prefect_home() / login_file().name
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(os.environ[LOGIN])


def named_server() -> str:
    """The API URL in PREFECT_API_URL, else that of `up`'s server; empty without either. Logs in if it is `up`'s."""
    own = running()
    named = os.environ.get("PREFECT_API_URL") or own
    if own and named == own:
        log_in()
    return named


def needed_server() -> str:
    """As `named_server`. UserError if there is none."""
    if not (api_url := named_server()):
        raise UserError("no Prefect server runs here: start it with `arealflow up`, or name one in PREFECT_API_URL")
    return api_url


@contextmanager
def asking(api_url: str) -> Iterator[None]:
    """Inside, Prefect's client asks the server at this address; what fails there is raised as a UserError."""
    from prefect.settings import temporary_settings  # here: Prefect takes a second to import

    try:
        with temporary_settings(client_settings(api_url, os.environ.get(LOGIN, ""))):
            yield
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # Prefect's client raises a RuntimeError as well
        raise UserError(why(api_url, error)) from error


def client_settings(api_url: str, login: str) -> dict[Any, Any]:
    """Settings for Prefect's client of this server; without a login, the user's own credentials stay."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    return {PREFECT_API_URL: api_url, **({PREFECT_API_AUTH_STRING: login} if login else {})}


def why(api_url: str, error: Exception) -> str:
    """The message for an error of httpx or of Prefect's client: what is wrong with the server, and the remedy."""
    cause = error if isinstance(error, httpx.HTTPError) else error.__cause__
    if isinstance(cause, httpx.TransportError):
        return f"no Prefect server answers at {api_url} ({cause or type(cause).__name__}): check that it runs"
    if isinstance(cause, httpx.HTTPStatusError):
        remedy = CREDENTIALS if cause.response.status_code in REFUSED else "see its log"
        return f"the Prefect server at {api_url} answers {cause.response.status_code}: {remedy}"
    return f"Prefect's client cannot use the server at {api_url}: {error or type(error).__name__}"


def spawn(name: str, command: Sequence[str], api_url: str) -> psutil.Process:
    """Start a part of `up` that outlives this process; its output goes to a log of that name."""
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        return psutil.Popen(
            command,
            env=environment(api_url) | {PART: name},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def python(module: str) -> list[str]:
    """The command that runs a module; with -P, since the current folder may contain packages named like ours."""
    return [sys.executable, "-P", "-m", module]


def environment(api_url: str) -> dict[str, str]:
    """The environment of our Prefect server and of processes that use it: its address, login and our folders."""
    store = {"AREALFLOW_STORE": store_url(named)} if (named := os.environ.get("AREALFLOW_STORE")) else {}
    return {
        **os.environ,
        **store,  # absolute, since flow runs have other working directories
        "AREALFLOW_HOME": str(home()),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home() / "prefect"),
        **server_settings(api_url, os.environ.get(LOGIN, "")),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONUNBUFFERED": "1",
    }


def kept_variables(api_url: str) -> list[str]:
    """The names of the variables that have other values in what `up` has started than it would give them now."""
    found: set[str] = set()
    own = environment(api_url)
    for process in parts("server", "worker", "keeper"):
        with suppress(psutil.Error, OSError):
            kept = process.environ()
            found |= {name for name in own.keys() | kept.keys() if own.get(name) != kept.get(name)}
    return sorted(name for name in found - {PART} if READ.match(name))
