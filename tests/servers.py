"""Servers that a whole test run shares: Prefect's own, everything that `arealflow up` starts, and one for S3."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import session_folder
import warm_processes
from prefect_api import ask
from s3_server import S3Server
from waiting import LIMIT, wait_until

from areal_tasks.engines.ports import probe_port
from flows.cli import machine, processes
from flows.home import home

T = TypeVar("T")

TESTS: Final = Path(__file__).resolve().parent
ROOT: Final = TESTS.parent
#: Prefect servers that are up, by the name of their fixture. They are closed when no later test needs them.
OPEN: Final[dict[str, ExitStack]] = {}


@contextmanager
def while_needed(name: str, server: AbstractContextManager[T]) -> Iterator[T]:
    with ExitStack() as stack:
        OPEN[name] = stack
        yield stack.enter_context(server)


# ── Prefect ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def prefect_server(home_folder: Path) -> Iterator[str]:
    """The URL of a server's API. Sets AREALFLOW_HOME and Prefect's settings during the block."""
    from prefect.settings import PREFECT_HOME, temporary_settings  # not for tests that need no server

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(home_folder))
        patch.setattr(processes, "START_SECONDS", LIMIT)
        patch.setenv(processes.LOGIN, "")  # so that what `start_server` makes of it is undone in the end
        try:
            url = machine.start_server(probe_port())
            patch.setenv("PREFECT_API_URL", url)
            patch.setenv("PREFECT_HOME", str(home() / "prefect"))
            settings = processes.client_settings(url, os.environ[processes.LOGIN])
            with temporary_settings({**settings, PREFECT_HOME: home() / "prefect"}):
                yield url
        finally:
            processes.end(processes.parts("server"))


@dataclass(frozen=True)
class Up:
    """A running `arealflow up`: the server's URL, and the environment of its processes."""

    url: str
    environment: dict[str, str]

    @property
    def api(self) -> str:
        return f"{self.url}/api"

    def arealflow(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a user does."""
        command = [sys.executable, "-c", "from flows.cli.main import main; main()", *arguments]
        environment = self.environment | variables
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    @property
    def login(self) -> str:
        return (Path(self.environment["AREALFLOW_HOME"]) / "prefect" / "login").read_text()

    @contextmanager
    def logged_in(self) -> Iterator[None]:
        """Inside, requests of this process show the login."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(processes.LOGIN, self.login)
            yield

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self.logged_in():
            return ask(method, f"{self.api}/{path}", body).raise_for_status()

    def get(self, path: str) -> Any:
        return self.ask("GET", path).json()

    def post(self, path: str, **body: Any) -> Any:
        return self.ask("POST", path, body).json()

    def fork_flows(self, name: str) -> str:
        """The ID of the deployment of that name, whose flow processes are forked from now on."""
        found = str(self.get(f"deployments/name/{name}")["id"])
        command = shlex.join([*warm_processes.FORKED, "prefect.engine"])
        self.ask("PATCH", f"deployments/{found}", {"job_variables": {"command": command}})
        return found

    @property
    def store(self) -> Path:
        return Path(self.environment["AREALFLOW_HOME"]) / "store"


@contextmanager
def arealflow_up(home_folder: Path) -> Iterator[Up]:
    port = probe_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AREALFLOW_"))}
    modules = os.pathsep.join(str(folder) for folder in (ROOT, TESTS, TESTS / "ui"))
    own = {"AREALFLOW_HOME": str(home_folder), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    found = Up(f"http://127.0.0.1:{port}", {**inherited, **own})
    started = found.arealflow("up", "--port", str(port))
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        said = re.search(r"^Prefect UI: (\S+)$", started.stdout, re.MULTILINE)  # another port, if that was taken
        assert said is not None, started.stdout
        found = replace(found, url=said[1])
        yield found
    finally:
        found.arealflow("down")


# ── S3 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shared_s3_server() -> S3Server:
    """The server of this test run. It outlives the worker that starts it."""
    exported = (session_folder.once("s3", _start_s3) / "exported").read_text()
    values = dict(line.removeprefix("export ").split("=", 1) for line in exported.splitlines())
    return S3Server(values["AWS_ENDPOINT_URL"], values["AWS_ACCESS_KEY_ID"], values["AWS_SECRET_ACCESS_KEY"])


def _start_s3(place: Path) -> None:
    command = [sys.executable, str(TESTS / "s3_server.py"), str(session_folder.folder() / "s3-data")]
    with (place / "exported").open("w") as exported:
        process = warm_processes.Popen(command, stdout=exported, start_new_session=True)
    wait_until(lambda: "AREALFLOW_STORE" in (place / "exported").read_text() or process.poll() is not None)
    assert process.poll() is None
