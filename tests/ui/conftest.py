"""A webhook on this machine."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from webhook import Webhook


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
