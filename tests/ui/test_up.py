"""What `arealflow up` leaves running."""

from __future__ import annotations

import pytest
from listeners import beyond_loopback, listening
from servers import Up

from flows.cli.processes import parts


def test_server_worker_and_keeper_listen_on_loopback_alone(up: Up) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", up.environment["AREALFLOW_HOME"])
        roots = parts("server", "worker", "keeper")
    assert len(roots) == 3
    assert any(listening(roots).values()), "the server listens"
    assert beyond_loopback(roots) == {}
