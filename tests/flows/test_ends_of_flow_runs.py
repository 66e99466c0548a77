"""How a flow finds out why it ends, how long it has for that, and by what others find out that it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import uuid
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from prefect.runner import _flow_run_executor
from prefect.runner._process_manager import ProcessManager
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.workers import process

from flows import worker
from flows.cli.automations import read_automation
from flows.execute import ending_action
from flows.worker import CANCEL_SECONDS, QuickKillManager

HEARTBEATS = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
RUN = {"id": str(uuid.uuid4()), "flow_id": str(uuid.uuid4()), "state_type": "CANCELLING"}


class Guarded(BaseHTTPRequestHandler):
    """A Prefect server behind a password, with one flow run."""

    def do_GET(self) -> None:
        knows = self.headers["Authorization"] == f"Basic {b64encode(b'me:key').decode()}"
        answer = json.dumps(RUN).encode() if knows and self.path == f"/flow_runs/{RUN['id']}" else b"{}"
        self.send_response(200 if knows else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def test_who_asks_why_a_flow_run_ends_says_who_they_are() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: "me:key"}):
            assert ending_action(KeyboardInterrupt(), RUN["id"]) == "cancelled"
        server.shutdown()


def test_a_flow_process_that_is_cancelled_has_seconds_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, bool]] = []

    async def kill(self: ProcessManager, flow_run_id: uuid.UUID, grace_seconds: float, *, force: bool) -> None:
        given.append((grace_seconds, force))

    monkeypatch.setattr(ProcessManager, "kill", kill)
    for options in ({}, {"grace_seconds": 30.0}, {"grace_seconds": 1.0, "force": True}):
        asyncio.run(QuickKillManager().kill(uuid.uuid4(), **options))
    assert given == [(CANCEL_SECONDS, False), (CANCEL_SECONDS, False), (1.0, True)] and CANCEL_SECONDS < 10


def test_flow_runs_send_three_heartbeats_before_they_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = ((process, "EngineCommandStarter"), (process, "load_flow_from_flow_run"))
    for module, name in (*replaced, (_flow_run_executor, "ProcessManager")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that what `main` changes is undone

    async def ended() -> None:
        """The worker's work: none."""

    monkeypatch.setattr(worker, "FlowWorker", lambda **_: SimpleNamespace(start=ended))
    monkeypatch.setenv(HEARTBEATS, "45")
    worker.main()
    assert os.environ[HEARTBEATS] == "45"
    monkeypatch.delenv(HEARTBEATS)
    worker.main()
    assert os.environ[HEARTBEATS] == str(worker.HEARTBEAT_SECONDS)
    assert read_automation("lost")["trigger"]["within"] >= 3 * worker.HEARTBEAT_SECONDS
