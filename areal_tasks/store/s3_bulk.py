"""Files of any size into and out of a bucket: in parts, by many threads.

s3fs runs every request in the one thread of its event loop. That is enough for records and tables; for weights it is
what they wait for. Here each part is one request of botocore, which s3fs is built on, in a thread of its own: the
interpreter's lock is free while bytes are sent, received, written or hashed, and no byte is copied on its way out.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import IncompleteReadError, ResponseStreamingError
from urllib3.exceptions import HTTPError

from areal_tasks.store.backend import Content, Missing, StoreError

T = TypeVar("T")

#: Larger files go and come in parts of this size, or of more where S3 would not take so many.
PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000
_RUN_BYTES: Final = 256 << 10  # sent or received at once: what a timeout is for, and what a thread holds in memory
_HASH_BYTES: Final = 1 << 20
_THREADS: Final = 32  # of a store: they wait for the network
_SEND_SECONDS: Final = 10  # botocore's timeout for connecting is also that for sending a run


class Ask(Protocol):
    """Asks, again where that may help; errors are StoreErrors that name the path."""

    def __call__(self, path: str, ask: Callable[[], T]) -> T: ...


@dataclass
class Bulk:
    """Transfers of objects below `root` (`bucket/prefix`); one for all threads of a process.

    A part carries its CRC32, which the server compares; requests are signed without a hash of their bodies. What is
    fetched is hashed while it comes. Bytes lie in the caller's memory, or in a file, and a run of them in each thread.
    """

    root: str
    options: dict[str, Any]  # of botocore's client
    ask: Ask
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "s3"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: Any = None

    def put(self, path: str, pieces: Content) -> None:
        """Write an object that consists of `pieces`, end to end. They must stay as they are until it returns."""
        views = [view for piece in pieces if len(view := memoryview(piece).cast("B"))]
        size = sum(len(view) for view in views)
        if size <= PART_BYTES:
            told = _described(views)
            self.ask(path, lambda: self._client().put_object(**self._at(path), Body=_body(views), **told))
        else:
            self._put_parts(path, views, size)

    def put_file(self, path: str, source: Path) -> None:
        """Write a file, which must stay as it is until it returns."""
        with source.open("rb") as file:
            empty = not os.fstat(file.fileno()).st_size  # what has no bytes cannot be mapped
            self.put(path, [] if empty else [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))])

    def fetch(self, path: str, target: Path) -> str:
        """Copy an object into a local file; returns its SHA-256 in hex, made while the parts come."""
        size = int(self.ask(path, lambda: self._client().head_object(**self._at(path)))["ContentLength"])
        with target.open("w+b", buffering=0) as file:
            starts = range(0, max(size, 1), PART_BYTES)
            coming = [self._pool.submit(self._fetch_part, path, file, size, start) for start in starts]
            try:
                return _hashed(file, coming)
            finally:
                _stop(coming)

    def _fetch_part(self, path: str, file: FileIO, size: int, start: int) -> None:
        end = min(start + PART_BYTES, size)
        # a checksum that the server sends is of the whole object
        what = {"ChecksumMode": "ENABLED"} if size <= PART_BYTES else {"Range": f"bytes={start}-{end - 1}"}
        self.ask(path, lambda: _receive(self._client().get_object(**self._at(path), **what)["Body"], file, start, end))

    def _put_parts(self, path: str, views: Sequence[memoryview], size: int) -> None:
        client, at = self._client(), self._at(path)
        opened = self.ask(path, lambda: client.create_multipart_upload(**at, ChecksumAlgorithm="CRC32"))
        at["UploadId"] = opened["UploadId"]
        step = max(PART_BYTES, -(-size // _MOST_PARTS))
        cuts = [(number, _cut(views, start, start + step)) for number, start in enumerate(range(0, size, step), 1)]
        going = [self._pool.submit(self._put_part, path, at, *cut) for cut in cuts]
        try:
            self._complete(path, at, [part.result() for part in going], size)
        except BaseException:
            _stop(going)
            with suppress(Exception):  # the first error is the one to report
                client.abort_multipart_upload(**at)
            raise

    def _put_part(self, path: str, at: dict[str, Any], number: int, views: Sequence[memoryview]) -> dict[str, Any]:
        """Upload one part; returns how the end of the upload names it."""
        told = _described(views)
        answer = self.ask(path, lambda: self._client().upload_part(**at, PartNumber=number, Body=_body(views), **told))
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": told["ChecksumCRC32"]}

    def _complete(self, path: str, at: dict[str, Any], parts: list[dict[str, Any]], size: int) -> None:
        """End an upload. Its answer may have been lost: then S3 knows the upload no more, and the object is there."""
        try:
            self.ask(path, lambda: self._client().complete_multipart_upload(**at, MultipartUpload={"Parts": parts}))
        except Missing:
            head = self.ask(path, lambda: self._client().head_object(**self._at(path)))
            if head["ContentLength"] != size:
                raise

    def _at(self, path: str) -> dict[str, Any]:
        bucket, _, key = f"{self.root}/{path}".partition("/")
        return {"Bucket": bucket, "Key": key}

    def _client(self) -> Any:
        """Made when it is first needed, which takes a tenth of a second."""
        with self._lock:
            if self._made is None:
                self._made = botocore.session.Session().create_client("s3", **self.options)
            return self._made


def bulk_options(s3fs_options: dict[str, Any]) -> dict[str, Any]:
    """The options of botocore's client that mean what those of s3fs mean."""
    config = s3fs_options["config_kwargs"] | {
        "connect_timeout": _SEND_SECONDS,
        "s3": {"payload_signing_enabled": False},  # over http it would hash every body once more
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return {
        "endpoint_url": s3fs_options["endpoint_url"],
        "aws_access_key_id": s3fs_options["key"],
        "aws_secret_access_key": s3fs_options["secret"],
        "aws_session_token": s3fs_options["token"],
        "config": Config(**config),
        **s3fs_options["client_kwargs"],
    }


class _Body:
    """Bytes to be sent, as botocore reads them."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.runs = [view[at : at + _RUN_BYTES] for view in views for at in range(0, len(view), _RUN_BYTES)]
        self.next = 0

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next run, whatever size is asked for: 16 KiB, each sent by itself, of which a GB has 61,000."""
        self.next += 1
        return self.runs[self.next - 1] if self.next <= len(self.runs) else b""

    def tell(self) -> int:
        return sum(len(run) for run in self.runs[: self.next])

    def seek(self, to: int) -> None:
        """Back to the beginning, to be sent again; botocore seeks nothing else."""
        if to:
            raise ValueError(f"only to the beginning, not to {to}")
        self.next = 0


def _body(views: Sequence[memoryview]) -> _Body | bytes:
    return _Body(views) if views else b""


def _described(views: Sequence[memoryview]) -> dict[str, Any]:
    """Length and CRC32 of a body, as botocore's commands name them."""
    check = 0
    for view in views:
        check = zlib.crc32(view, check)
    size = sum(len(view) for view in views)
    return {"ContentLength": size, "ChecksumCRC32": b64encode(check.to_bytes(4, "big")).decode()}


def _cut(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The bytes from `start` to `end` of `views`, laid end to end."""
    found, at = [], 0
    for view in views:
        if start < at + len(view) and at < end:
            found.append(view[max(start - at, 0) : end - at])
        at += len(view)
    return found


def _receive(body: Any, file: FileIO, start: int, end: int) -> None:
    """Write an answer into `file` from `start`; IncompleteReadError unless it reaches `end`."""
    at = start
    try:
        while run := body.read(_RUN_BYTES):
            at += _write(file, run, at)
    except HTTPError as error:  # botocore knows some of urllib3's; of TLS, for one, it does not
        raise ResponseStreamingError(error=error) from error
    finally:
        body.close()
    if at != end:
        raise IncompleteReadError(actual_bytes=at - start, expected_bytes=end - start)


def _write(file: FileIO, run: bytes, at: int) -> int:
    """A full disk is no fault of the store, which would be asked again."""
    try:
        written = os.pwrite(file.fileno(), run, at)
        while written < len(run):  # nearly full
            written += os.pwrite(file.fileno(), run[written:], at + written)
    except OSError as error:
        raise StoreError(f"{file.name!s} cannot be written ({error.strerror}): make room, then run again.") from error
    return written


def _hashed(file: FileIO, coming: Sequence[Future[None]]) -> str:
    """SHA-256 of a file, of which each part is there when its future has ended."""
    digest, buffer, at = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES)), 0
    for number, part in enumerate(coming, 1):
        part.result()
        end = number * PART_BYTES
        while at < end and (read := os.preadv(file.fileno(), [buffer[: end - at]], at)):
            digest.update(buffer[:read])
            at += read
    return digest.hexdigest()


def _stop(futures: Sequence[Future[Any]]) -> None:
    """Let none begin any more, and wait until those that have begun are done with what they were given."""
    for future in futures:
        future.cancel()
    wait(futures)
