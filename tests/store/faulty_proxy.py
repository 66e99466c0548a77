"""A proxy between the program and the S3 server that spoils answers, as networks and servers do."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from waiting import LIMIT

ERROR_500 = (500, b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>injected</Message></Error>')
ERROR_403 = (403, b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>injected</Message></Error>')
ERROR_409 = (
    409,
    b'<?xml version="1.0"?><Error><Code>ConditionalRequestConflict</Code><Message>injected</Message></Error>',
)
ERROR_503 = (503, b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>injected</Message></Error>')
HANG_UP = (0, b"")
TORN = (-1, b"")  # half of the true answer, then the connection ends
SHORT = (-2, b"")  # half of the true answer, as if it were all of it
FLIPPED = (-3, b"")  # the true answer with one bit altered
ALTERED = (-5, b"")  # one bit of what is asked is altered before the server sees it
EMPTY_LISTING = (-4, b"")  # the true answer to a listing without any of its entries
_ENTRIES = re.compile(rb"<(Contents|CommonPrefixes)>.*?</\1>|<KeyCount>.*?</KeyCount>", re.DOTALL)


@dataclass
class Faults:
    """What the proxy does to the next requests that `spoils`: `left` of them, before or after the server sees them."""

    answer: tuple[int, bytes] = ERROR_500
    left: int = 0
    store_first: bool = True
    spoils: Callable[[str, str], bool] = lambda method, path: method == "PUT"
    checksums: bool = True  # whether spoiled answers keep the server's, by which a client finds them out
    held: threading.Event | None = None  # until it is set, no spoiled request is answered
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, path: str) -> bool:
        with self.lock:
            self.seen.append(method)
            spoiled = self.left > 0 and self.spoils(method, path)
            self.left -= spoiled
            return spoiled


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
        if self.faults.held is not None:
            assert self.faults.held.wait(LIMIT)
        if self.faults.answer == ALTERED:
            self._answer(*self._forward(bytes(b ^ 1 for b in body[:1]) + body[1:]))
            return
        if self.faults.answer[0] < 0:
            self._distort(*self._forward(body))
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

    def _distort(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """The true answer, damaged on its way."""
        half = len(body) // 2
        if not self.faults.checksums:
            headers = {name: value for name, value in headers.items() if "checksum" not in name.lower()}
        if self.faults.answer == TORN:
            self.close_connection = True
            self._answer(status, headers, body[:half])
        elif self.faults.answer == SHORT:
            self._answer(status, _of_length(headers, half), body[:half])
        elif self.faults.answer == FLIPPED:
            self._answer(status, headers, body[:half] + bytes(b ^ 1 for b in body[half : half + 1]) + body[half + 1 :])
        else:
            listed = _ENTRIES.sub(b"", body)
            self._answer(status, _of_length(headers, len(listed)), listed)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=LIMIT)
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


def _of_length(headers: dict[str, str], length: int) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "Content-Length"} | {
        "Content-Length": str(length)
    }
