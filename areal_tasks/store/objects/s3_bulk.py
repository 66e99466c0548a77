"""Transfers of files of any size to and from a bucket, in parts, by many threads.

Each part is one request in a thread of its own: the GIL is released while bytes are sent, received, written or hashed,
and uploads copy no bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import IncompleteReadError, ResponseStreamingError
from urllib3.exceptions import HTTPError

from areal_tasks.store.backend import Content, Missing, StoreError

#: Larger files are transferred in parts of this size, or larger ones where S3 would not take so many.
PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000
_RUN_BYTES: Final = 256 << 10  # sent or received at once: a timeout is per run, and a thread holds one in memory
_HASH_BYTES: Final = 1 << 20
_THREADS: Final = 32  # of a store: they wait for the network


@dataclass
class Bulk:
    """Transfers by a client of botocore; one for all threads of a process. `at` names an object as its commands do.

    `call` makes a request, again where that may help; errors are StoreErrors that name the path.
    A part is sent with its CRC32, which the server checks; requests are signed without a hash of their bodies. Fetched
    bytes are hashed as they arrive. Bytes lie in the caller's memory, or in a file, and a run of them in each thread.
    """

    client: Any
    at: Callable[[str], dict[str, Any]]
    call: Callable[[str, Callable[[], Any]], Any]
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "s3"))

    def put(self, path: str, pieces: Content) -> None:
        """Write an object of the concatenated `pieces`, which must not change until it returns."""
        views = [view for piece in pieces if len(view := memoryview(piece).cast("B"))]
        size = sum(len(view) for view in views)
        if size <= PART_BYTES:
            meta = body_headers(views)
            self.call(path, lambda: self.client.put_object(**self.at(path), Body=_body(views), **meta))
        else:
            self._put_parts(path, views, size)

    def put_file(self, path: str, source: Path) -> None:
        """Write a file, which must not change until it returns."""
        with source.open("rb") as file:
            empty = not os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
            self.put(path, [] if empty else [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))])

    def fetch(self, path: str, target: Path, size: int) -> str:
        """Copy an object of `size` bytes into a local file; returns its SHA-256 in hex, computed as parts arrive."""
        with target.open("w+b", buffering=0) as file:
            starts = range(0, max(size, 1), PART_BYTES)
            fetches = [self._pool.submit(self._fetch_part, path, file, size, start) for start in starts]
            try:
                return _hashed(file, fetches)
            finally:
                _stop(fetches)

    def _fetch_part(self, path: str, file: FileIO, size: int, start: int) -> None:
        end = min(start + PART_BYTES, size)
        # a checksum that the server sends covers the whole object
        what = {"ChecksumMode": "ENABLED"} if size <= PART_BYTES else {"Range": f"bytes={start}-{end - 1}"}
        self.call(path, lambda: _receive(self.client.get_object(**self.at(path), **what)["Body"], file, start, end))

    def _put_parts(self, path: str, views: Sequence[memoryview], size: int) -> None:
        at = self.at(path)
        opened = self.call(path, lambda: self.client.create_multipart_upload(**at, ChecksumAlgorithm="CRC32"))
        at["UploadId"] = opened["UploadId"]
        step = max(PART_BYTES, -(-size // _MOST_PARTS))
        cuts = [(number, _cut(views, start, start + step)) for number, start in enumerate(range(0, size, step), 1)]
        sends = [self._pool.submit(self._put_part, path, at, *cut) for cut in cuts]
        try:
            self._complete(path, at, [part.result() for part in sends], size)
        except BaseException:
            _stop(sends)
            with suppress(Exception):  # the first error is the one to report
                self.call(path, lambda: self.client.abort_multipart_upload(**at))
            raise

    def _put_part(self, path: str, at: dict[str, Any], number: int, views: Sequence[memoryview]) -> dict[str, Any]:
        """Upload one part; returns its entry for the completion of the upload."""
        meta = body_headers(views)
        answer = self.call(path, lambda: self.client.upload_part(**at, PartNumber=number, Body=_body(views), **meta))
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": meta["ChecksumCRC32"]}

    def _complete(self, path: str, at: dict[str, Any], parts: list[dict[str, Any]], size: int) -> None:
        """Complete an upload. If an earlier answer was lost, S3 no longer knows the upload, and the object exists."""
        try:
            self.call(path, lambda: self.client.complete_multipart_upload(**at, MultipartUpload={"Parts": parts}))
        except Missing:
            head = self.call(path, lambda: self.client.head_object(**self.at(path)))
            if head["ContentLength"] != size:
                raise


class _Body:
    """Bytes to be sent, as botocore reads them."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.runs = [view[at : at + _RUN_BYTES] for view in views for at in range(0, len(view), _RUN_BYTES)]
        self.next = 0

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next run, whatever `size` is: callers ask for 16 KiB, which would be 61,000 sends per GB."""
        self.next += 1
        return self.runs[self.next - 1] if self.next <= len(self.runs) else b""

    def tell(self) -> int:
        return sum(len(run) for run in self.runs[: self.next])

    def seek(self, to: int) -> None:
        """Rewind, to be sent again; botocore seeks to no other place."""
        if to:
            raise ValueError(f"only to the beginning, not to {to}")
        self.next = 0


def _body(views: Sequence[memoryview]) -> _Body | bytes:
    return _Body(views) if views else b""


def body_headers(views: Sequence[memoryview]) -> dict[str, Any]:
    """Length and CRC32 of a body, as botocore's commands name them."""
    check = 0
    for view in views:
        check = zlib.crc32(view, check)
    size = sum(len(view) for view in views)
    return {"ContentLength": size, "ChecksumCRC32": b64encode(check.to_bytes(4, "big")).decode()}


def _cut(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The bytes from `start` to `end` of the concatenated `views`."""
    found, at = [], 0
    for view in views:
        if start < at + len(view) and at < end:
            found.append(view[max(start - at, 0) : end - at])
        at += len(view)
    return found


@contextmanager
def reading_body(body: Any) -> Iterator[Any]:
    """The body of an answer, to be read within the block."""
    try:
        yield body
    except HTTPError as error:  # botocore translates only some of urllib3's; not those of TLS
        raise ResponseStreamingError(error=error) from error
    finally:
        body.close()


def _receive(answer: Any, file: FileIO, start: int, end: int) -> None:
    """Write the body of an answer into `file` from `start`; IncompleteReadError unless it reaches `end`."""
    at = start
    with reading_body(answer) as body:
        while run := body.read(_RUN_BYTES):
            at += _write(file, run, at)
    if at != end:
        raise IncompleteReadError(actual_bytes=at - start, expected_bytes=end - start)


def _write(file: FileIO, run: bytes, at: int) -> int:
    """Write `run` at the offset `at`. A full disk is not `Unavailable`, so that the request is not retried."""
    try:
        written = os.pwrite(file.fileno(), run, at)
        while written < len(run):  # nearly full
            written += os.pwrite(file.fileno(), run[written:], at + written)
    except OSError as error:
        raise StoreError(f"{file.name!s} cannot be written ({error.strerror}): free space, then run again.") from error
    return written


def _hashed(file: FileIO, fetches: Sequence[Future[None]]) -> str:
    """SHA-256 of a file, each part of which is complete when its future has ended."""
    digest, buffer, at = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES)), 0
    for number, part in enumerate(fetches, 1):
        part.result()
        end = number * PART_BYTES
        while at < end and (read := os.preadv(file.fileno(), [buffer[: end - at]], at)):
            digest.update(buffer[:read])
            at += read
    return digest.hexdigest()


def _stop(futures: Sequence[Future[Any]]) -> None:
    """Cancel those that have not begun, and wait for the others, which still use the caller's memory or file."""
    for future in futures:
        future.cancel()
    wait(futures)
