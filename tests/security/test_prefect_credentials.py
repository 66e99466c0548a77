"""What commands and the keeper ask a Prefect server that wants credentials, and what they say if it refuses them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows.cli import automations, keeper, machine
from flows.cli.processes import parts
from schemas.errors import UserError

PASSWORD = f"Basic {b64encode('me:schlüssel'.encode()).decode()}"
REMEDY = "check PREFECT_API_KEY or PREFECT_API_AUTH_STRING"


class Guarded(BaseHTTPRequestHandler):
    """A Prefect server without automations and flow runs, behind a password or a key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        known = self.headers["Authorization"] in (PASSWORD, "Bearer a-key") or self.path == "/api/health"
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    do_GET = do_POST


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its API URL, also in the environment, which has no credentials."""
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


@pytest.mark.parametrize(
    "credentials",
    [
        {"PREFECT_API_AUTH_STRING": "me:schlüssel"},
        {"PREFECT_API_KEY": "a-key"},
        {"PREFECT_API_AUTH_STRING": "me:schlüssel", "PREFECT_API_KEY": "other"},  # as Prefect's client decides
    ],
)
def test_credentials_of_the_environment_are_sent(
    guarded: str, credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    assert automations.find(guarded, "any") is None
    assert keeper.find_flow_runs(guarded, "RUNNING") == []


def test_a_server_that_refuses_is_not_called_away(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "a wrong one"):
        monkeypatch.setenv("PREFECT_API_KEY", key)
        with pytest.raises(UserError, match=f"at {guarded} answers 401: {REMEDY}$"):
            automations.alerts(no_more=True)
        with pytest.raises(UserError, match=f"refused the work pool arealflow: {REMEDY}$"):
            automations.install(guarded)


def test_a_run_that_the_server_refuses_ends_in_one_message(guarded: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "run", "quickstart-sft"]
    values = {**os.environ, "AREALFLOW_HOME": str(tmp_path)}
    ended = subprocess.run([*command, "run=refused"], env=values, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == f"error: the Prefect server at {guarded} answers 401: {REMEDY}\n"


def test_up_that_is_refused_starts_no_keeper(guarded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The keeper and the worker that it starts would keep the wrong credentials, also for the next `up`."""
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "running", lambda: guarded)
    monkeypatch.setattr(machine, "answers", lambda api_url: True)
    with pytest.raises(UserError, match=REMEDY):
        machine.start()
    assert parts("keeper") == []
