"""Fixtures that several parts share, and what holds for every test: see CONTRIBUTING.md."""

from __future__ import annotations

import os

#: Tests run side by side, on models that gain nothing from a second thread. Libraries read it when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import session_folder
import warm_processes
from hypothesis import HealthCheck, settings
from s3_server import BUCKET, S3Server
from up_machine import ROOT, Up
from waiting import LIMIT, wait_until

from areal_tasks.engines.ports import loopback_port
from areal_tasks.store.backend import Store, open_store
from flows.cli import machine
from flows.home import home

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("any machine", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Every process of the test run has the shared folder."""
    stack = ExitStack()
    stack.enter_context(session_folder.opened())
    config.add_cleanup(stack.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from scheduling import group_by_server  # xdist need not be there where it is not used

        group_by_server(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import ModuleScheduling

    return ModuleScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _warm_services() -> None:
    """Services that import torch are forked from a process that has done so."""
    warm_processes.install()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window, for one module of tests and no longer.

    While Playwright runs, it is this thread's event loop: neither `asyncio.run` nor a second Playwright works.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium is installed here (Debian: apt install chromium)")
    from playwright.sync_api import expect, sync_playwright  # where no browser is, it need not be either

    expect.set_options(timeout=1000 * LIMIT)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield found
        found.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server, one for the test run, whose keys are in the environment from here on."""
    exported = (session_folder.once("s3", start_s3) / "exported").read_text()
    values = dict(line.removeprefix("export ").split("=", 1) for line in exported.splitlines())
    server = S3Server(values["AWS_ENDPOINT_URL"], values["AWS_ACCESS_KEY_ID"], values["AWS_SECRET_ACCESS_KEY"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def start_s3(place: Path) -> None:
    """It outlives the worker that starts it, and ends with the test run."""
    command = [sys.executable, str(TESTS / "s3_server.py"), str(session_folder.folder() / "s3-data")]
    with (place / "exported").open("w") as exported:
        process = warm_processes.Popen(command, stdout=exported, start_new_session=True)
    wait_until(lambda: "AREALFLOW_STORE" in (place / "exported").read_text() or process.poll() is not None)
    assert process.poll() is None


@pytest.fixture(scope="session")
def s3_store(s3: S3Server) -> Store:
    """A store on a real S3 server, empty at first and shared by the session: use run names of your own."""
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Prefect server's API. A home of our own, and settings for it, are in force from here on."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings  # not for tests that need no server

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        (home() / "prefect").mkdir()
        patch.setattr(machine, "START_SECONDS", LIMIT)
        url = f"http://127.0.0.1:{loopback_port()}/api"
        server = machine.start_server(url)
        try:
            machine._wait_for(url, server)
            patch.setenv("PREFECT_API_URL", url)
            patch.setenv("PREFECT_HOME", str(home() / "prefect"))
            with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: home() / "prefect"}):
                yield url
        finally:
            machine.stop(server)


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Everything that `arealflow up` starts: server, worker, keeper and the deployments of prefect.yaml."""
    home, port = tmp_path_factory.mktemp("home"), loopback_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AREALFLOW_"))}
    modules = os.pathsep.join(str(folder) for folder in (ROOT, TESTS, TESTS / "ui"))
    own = {"AREALFLOW_HOME": str(home), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    machine = Up(f"http://127.0.0.1:{port}", {**inherited, **own})
    started = machine.arealflow("up", "--port", str(port))
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert machine.url in started.stdout
        yield machine
    finally:
        machine.arealflow("down")
