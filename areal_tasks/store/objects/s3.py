"""A store in an S3 bucket. Creation is one conditional put (`If-None-Match: *`), which the server decides."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import pyarrow as pa
import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    ResponseStreamingError,
)
from pyarrow.fs import FileSystem, S3FileSystem

from areal_tasks.store.backend import Content, Exists, Missing, StoreError, Unavailable, s3_endpoint, s3_region
from areal_tasks.store.objects.s3_bulk import Bulk, bulk_options
from schemas.errors import UserError

T = TypeVar("T")

#: How long requests are retried while a store that has answered before is overloaded or unreachable.
PATIENCE_SECONDS = 20.0
_CONNECT_SECONDS: Final = 2  # three attempts: an endpoint that does not answer is reported in less than 10 s
_READ_SECONDS: Final = 30
_ATTEMPTS: Final = 3  # at least
_CONFLICT_ATTEMPTS: Final = 5
_TORN_ATTEMPTS: Final = 5
_LONGEST_PAUSE: Final = 2.0
_TORN: Final = (
    *(aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError),
    *(FlexibleChecksumError, IncompleteReadError, ResponseStreamingError),
)
_ALTERED: Final = ("BadDigest", "XAmzContentChecksumMismatch")  # the server received altered bytes
_SCAN_THREADS: Final = 32

_KEYS_REMEDY: Final = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_REMEDIES: Final = {
    "NoSuchBucket": "create the bucket, or correct the store's URL",
    "InvalidAccessKeyId": f"the server does not know this access key: {_KEYS_REMEDY}",
    "SignatureDoesNotMatch": f"the secret key is wrong: {_KEYS_REMEDY}",
    "InvalidToken": f"the session token is wrong: {_KEYS_REMEDY}",
    "ExpiredToken": f"the session token has expired: {_KEYS_REMEDY}",
    "AccessDenied": f"these credentials may not do that: let them read and write the bucket, or {_KEYS_REMEDY}",
    "403": f"these credentials may not do that: let them read and write the bucket, or {_KEYS_REMEDY}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "NotImplemented": "this server lacks conditional puts, which commits need: use one that has them (AWS, SeaweedFS)",
    "QuotaExceeded": "the bucket's quota is used up: free some space, then run again",
}
_OTHER_REMEDY: Final = "check that the server is healthy and has free space, then run again"
_TORN_REMEDY: Final = "check the network and any proxy before the server, then run again"
_UNREACHABLE: Final = "check AWS_ENDPOINT_URL, the network and that the server is up, then run again"


class S3Backend:
    """Objects below `prefix` of `bucket`. Endpoint, region and credentials come from the environment only.

    Raises:
        UserError: credentials are not set.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.root = f"{bucket}/{prefix}".rstrip("/")
        self.endpoint = s3_endpoint() or None
        options = _options(self.endpoint)
        self.fs = s3fs.S3FileSystem(**options)
        self.fs.retries = 1  # `retried` alone repeats requests
        self.known = False  # it has answered: from then on a failure is more likely temporary than a wrong URL
        self.bulk = Bulk(self.root, bulk_options(options), self.retried)

    def read(self, path: str) -> bytes:
        data: bytes = self.retried(path, lambda: self.fs.cat_file(self._at(path)))
        return data

    def create(self, path: str, data: bytes) -> None:
        for attempt in range(_CONFLICT_ATTEMPTS):
            try:
                return self._put(path, data, mode="create")
            except _Conflict:  # another put of the same name was in flight: retry to see which won
                time.sleep(0.05 * 2**attempt)
        raise StoreError(f"The store's object {self.uri(path)} stays contended: {_OTHER_REMEDY}.")

    def settle(self, path: str) -> None:
        """Nothing to do: S3 acknowledges a put once the object is durable."""

    def put(self, path: str, data: bytes) -> None:
        self._put(path, data, mode="overwrite")

    def put_file(self, path: str, source: Path) -> None:
        self.bulk.put_file(path, source)

    def put_pieces(self, path: str, pieces: Content) -> None:
        self.bulk.put(path, pieces)

    def fetch_file(self, path: str, target: Path) -> str:
        return self.bulk.fetch(path, target)

    def size(self, path: str) -> int:
        bucket, key, _ = self.fs.split_path(self._at(path))
        head = self.retried(path, lambda: self.fs.call_s3("head_object", Bucket=bucket, Key=key))
        return int(head["ContentLength"])

    def children(self, prefix: str) -> list[str]:
        try:
            found = self.retried(prefix, lambda: self.fs.ls(self._at(prefix), detail=False))
        except Missing:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def local(self, path: str) -> Path | None:
        return None

    def arrow(self) -> tuple[FileSystem, str]:
        pa.set_io_thread_count(max(_SCAN_THREADS, pa.io_thread_count()))  # they wait for the network
        scheme, _, host = (self.endpoint or "").rpartition("://")
        options = _options(self.endpoint)
        filesystem = S3FileSystem(
            access_key=options["key"],
            secret_key=options["secret"],
            session_token=options["token"],
            region=options["client_kwargs"]["region_name"],
            endpoint_override=host or None,
            scheme=scheme or None,
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_READ_SECONDS,
        )
        return filesystem, self.root

    def uri(self, path: str) -> str:
        return f"s3://{self._at(path)}"

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _put(self, path: str, data: bytes, mode: str) -> None:
        self.retried(path, lambda: self.fs.pipe_file(self._at(path), data, mode=mode))

    def retried(self, path: str, request: Callable[[], T]) -> T:
        """The answer of `request`, which may be repeated. Errors are StoreErrors, once retries have not helped."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                with self._errors(path):
                    answer = request()
                self.known = True
                return answer
            except Unavailable as error:
                attempt += 1
                torn = isinstance(error, _Torn)
                patient = self.known and not torn and time.monotonic() - started < PATIENCE_SECONDS
                if attempt >= (_TORN_ATTEMPTS if torn else _ATTEMPTS) and not patient:
                    raise
                time.sleep(_pause(attempt))
            except (Missing, Exists):
                self.known = True
                raise

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, BotoCoreError, ClientError, aiohttp.ClientError) as error:
            raise self._translate(path, error) from error

    def _translate(self, path: str, error: Exception) -> Exception:
        code = _error_code(error)
        if code in ("PreconditionFailed", "412"):
            return Exists(path)
        if code in ("ConditionalRequestConflict", "409"):
            return _Conflict(path)
        if code in ("NoSuchKey", "NoSuchUpload", "404") or (not code and isinstance(error, FileNotFoundError)):
            return Missing(self.uri(path))
        where = self.endpoint or "AWS"
        if isinstance(error, _TORN) or code in _ALTERED:
            return _Torn(
                f"{self.uri(path)} arrives incomplete or altered from {where} ({_short(error)}): {_TORN_REMEDY}."
            )
        if not code:
            return Unavailable(
                f"The store {self.uri('')} at {where} cannot be reached ({_short(error)}): {_UNREACHABLE}."
            )
        kind = StoreError if code in _REMEDIES else Unavailable
        remedy = _REMEDIES.get(code, _OTHER_REMEDY)
        return kind(f"The store at {where} refused {self.uri(path)} ({code}): {remedy}.")

    def list(self, prefix: str) -> list[str]:
        found = self.retried(prefix, lambda: self.fs.find(self._at(prefix)))
        return sorted(str(path).removeprefix(f"{self.root}/") for path in found)


class _Conflict(Exception):
    """S3 answered 409: two conditional puts collided."""


class _Torn(Unavailable):
    """Bytes were lost or altered in transit."""


def _pause(attempt: int) -> float:
    """Seconds before the next attempt: exponential backoff with jitter."""
    return float(min(_LONGEST_PAUSE, 0.1 * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))


def _options(endpoint: str | None) -> dict[str, Any]:
    return {
        "key": _credential("AWS_ACCESS_KEY_ID"),
        "secret": _credential("AWS_SECRET_ACCESS_KEY"),
        "token": os.environ.get("AWS_SESSION_TOKEN"),
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": s3_region() or "us-east-1"},
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": 64,
            "retries": {"total_max_attempts": 1},
        },
        "use_listings_cache": False,
        "max_concurrency": 1,  # with more, s3fs asks for an object's size before each read
    }


def _credential(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UserError(
            f"An s3:// store needs credentials, and {name} is not set: export it, have Prefect keep it for flow runs "
            "(`arealflow s3-keys`), or use a file:// store."
        )
    return value


def _error_code(error: BaseException) -> str:
    """S3's error code, which s3fs keeps as the cause of its own exception; empty if there was no answer."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ClientError):
            return str(seen.response["Error"].get("Code", ""))
        seen = seen.__cause__
    return ""


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
