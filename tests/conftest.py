"""Fixtures that several parts share, and what holds for every test: see CONTRIBUTING.md."""

from __future__ import annotations

import os

#: Tests run side by side, on models that gain nothing from a second thread. Libraries read it when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import session_folder
import warm_processes
from hypothesis import HealthCheck, settings
from s3_server import BUCKET, S3Server, s3_server

from areal_tasks.store.backend import Store, open_store
from flows.cli import machine
from flows.home import home

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("any machine", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
#: Fixtures that start a Prefect server.
SERVERS = ("api", "up")

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Every process of the test run has the shared folder."""
    stack = ExitStack()
    stack.enter_context(session_folder.opened())
    config.add_cleanup(stack.close)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For xdist: one worker runs a whole module, and one runs all that share a Prefect server; these begin first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    groups: dict[Path, str] = {}
    for item in items:
        shared = next((name for name in SERVERS if name in getattr(item, "fixturenames", ())), None)
        groups[item.path] = shared or groups.get(item.path) or item.path.relative_to(TESTS).as_posix()
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    items.sort(key=lambda item: groups[item.path] not in SERVERS)


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
    from playwright.sync_api import sync_playwright  # where no browser is, it need not be either

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield found
        found.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server on this machine, whose keys are in the environment from here on."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


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
        port = machine.free_port(42000)
        url = f"http://127.0.0.1:{port}/api"
        server = machine.start_server(url)
        try:
            machine._wait_for(url, server)
            patch.setenv("PREFECT_API_URL", url)
            patch.setenv("PREFECT_HOME", str(home() / "prefect"))
            with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: home() / "prefect"}):
                yield url
        finally:
            machine.stop(server)
