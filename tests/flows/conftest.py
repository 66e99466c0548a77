"""A real Prefect server for all tests of the flows, on a port and in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from flows.cli import machine
from flows.home import home


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server's API. Our own home, and settings for it, are in the environment from here on."""
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
