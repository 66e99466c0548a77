"""How a flow finds out why it ends, and how long it has for that."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.runner._process_manager import ProcessManager
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.execute import ending_action
from flows.worker import CANCEL_SECONDS, QuickKillManager

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
