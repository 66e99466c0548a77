"""A proxy between the program and the S3 server that spoils answers, as networks and servers do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERROR_500 = (500, b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>injected</Message></Error>')
ERROR_403 = (403, b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>injected</Message></Error>')
ERROR_409 = (
    409,
    b'<?xml version="1.0"?><Error><Code>ConditionalRequestConflict</Code><Message>injected</Message></Error>',
)
HANG_UP = (0, b"")


@dataclass
class Faults:
    """What the proxy does to the next requests that `spoils`: `left` of them, before or after the server sees them."""

    answer: tuple[int, bytes] = ERROR_500
    left: int = 0
    store_first: bool = True
    spoils: Callable[[str, str], bool] = lambda method, path: method == "PUT"
    seen: list[str] = field(default_factory=list)

    def take(self, method: str, path: str) -> bool:
        self.seen.append(method)
        if self.left > 0 and self.spoils(method, path):
            self.left -= 1
            return True
        return False


@contextmanager
def faulty_proxy(endpoint: str, faults: Faults) -> Iterator[str]:
    """The endpoint of a proxy in front of `endpoint`."""
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(endpoint).netloc, "faults": faults})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    faults: Faults

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        spoiled = self.faults.take(self.command, self.path)
        if not spoiled:
            self._answer(*self._forward(body))
            return
        if self.faults.store_first:
            status, _, _ = self._forward(body)
            assert status in (200, 412), status
        status, text = self.faults.answer
        if status == 0:
            self.close_connection = True
        else:
            self._answer(status, {"Content-Type": "application/xml"}, text)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        return answer.status, kept, answer.read()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None  # silence
