"""What `arealflow up` leaves running."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from listeners import beyond_loopback, listening
from servers import Up


def test_server_worker_and_keeper_listen_on_loopback_alone(up: Up) -> None:
    written = json.loads((Path(up.environment["AREALFLOW_HOME"]) / "up.json").read_text())
    roots = [psutil.Process(written[name]["pid"]) for name in ("server", "worker", "keeper")]
    assert any(listening(roots).values()), "the server listens"
    assert beyond_loopback(roots) == {}
