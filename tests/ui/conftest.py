"""Everything that `arealflow up` starts, in a folder of its own; a webhook on this machine."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ui_machine import ROOT, Up, Webhook

from flows.cli.machine import free_port


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home, port = tmp_path_factory.mktemp("home"), free_port(43000)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AREALFLOW_"))}
    modules = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "ui"))
    own = {"AREALFLOW_HOME": str(home), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    machine = Up(f"http://127.0.0.1:{port}", {**inherited, **own})
    started = machine.arealflow("up", "--port", str(port))
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert machine.url in started.stdout
        yield machine
    finally:
        machine.arealflow("down")


@pytest.fixture(scope="session")
def webhook() -> Iterator[Webhook]:
    """A receiver on this machine. Its path is a secret, as such paths are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.posted.append(json.loads(body) | {"path": self.path, "type": self.headers["content-type"]})
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are no news."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Webhook(f"http://127.0.0.1:{server.server_port}/s3cr3t-path")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield found
        server.shutdown()
