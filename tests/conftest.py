"""Fixtures that several directories share, and settings of all tests: see CONTRIBUTING.md."""

from __future__ import annotations

import os

#: Tests run concurrently, on models that gain nothing from a second thread. Libraries read this at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
#: Some virtual machines report AMX and do not support it: torch's bf16 products would end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import session_folder
import warm_processes
from hypothesis import HealthCheck, settings
from s3_server import BUCKET, S3Server
from servers import Up, arealflow_up, prefect_server, shared_s3_server, while_needed
from waiting import LIMIT

from areal_tasks.store.backend import Store, open_store
from flows.cli.processes import LOGIN

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("any machine", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
pytest.register_assert_rewrite("whole_run")  # else pytest shows no values where these fail


QUIET = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder that all processes of the test run share."""
    stack = ExitStack()
    stack.enter_context(session_folder.opened())
    config.add_cleanup(stack.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from scheduling import group_by_server  # here: it imports xdist, which may not be installed

        group_by_server(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        from scheduling import end_servers

        end_servers(item, nextitem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import ModuleScheduling

    return ModuleScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _warm_services() -> None:
    """Services that import torch are forked from a process that has done so."""
    warm_processes.install()


@pytest.fixture(autouse=True)
def _own_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose commands log in to a server leaves no login to the next."""
    monkeypatch.setenv(LOGIN, os.environ.get(LOGIN, ""))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window, for one module of tests and no longer.

    While Playwright runs, it is this thread's event loop: neither `asyncio.run` nor a second Playwright works.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium is installed here (Debian: apt install chromium)")
    from playwright.sync_api import expect, sync_playwright  # here: it may not be installed where no browser is

    expect.set_options(timeout=1000 * LIMIT)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield found
        found.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server on this machine; sets its keys in the environment."""
    server = shared_s3_server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def s3_store(s3: S3Server) -> Store:
    """A store on a real S3 server, empty at first and shared by the session: use run names of your own."""
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Prefect server's API; sets AREALFLOW_HOME and Prefect's settings for it."""
    with while_needed("api", prefect_server(tmp_path_factory.mktemp("home"))) as url:
        yield url


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A server, worker and keeper that `arealflow up` has started, in a home of their own."""
    with while_needed("up", arealflow_up(tmp_path_factory.mktemp("home"))) as machine:
        yield machine
