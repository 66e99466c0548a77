"""A store in an S3 bucket. Creation is one conditional put (`If-None-Match: *`), which the server decides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import botocore.session
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    FlexibleChecksumError,
    IncompleteReadError,
    ResponseStreamingError,
)
from pyarrow.fs import FileSystem, S3FileSystem

from areal_tasks.secret import secret
from areal_tasks.store.backend import Content, Exists, Missing, Store, StoreError, Unavailable, s3_endpoint, s3_region
from areal_tasks.store.objects.s3_bulk import Bulk, body_headers, reading_body
from schemas.errors import UserError, first_line

T = TypeVar("T")

#: How long requests are retried while a store that has answered before is overloaded or unreachable.
RETRY_SECONDS = 20.0
_CONNECT_SECONDS: Final = 2
_SEND_SECONDS: Final = 10  # botocore has one timeout for connecting and for sending a part of a body
_READ_SECONDS: Final = 30
_ATTEMPTS: Final = 3  # at least, unless nothing answers at all: that is reported after 10 s
_CORRUPTED_ATTEMPTS: Final = 5
_LONGEST_PAUSE: Final = 2.0
_CORRUPTED: Final = (FlexibleChecksumError, IncompleteReadError, ResponseStreamingError)
_ALTERED: Final = ("BadDigest", "XAmzContentChecksumMismatch")  # the server received altered bytes
_SCAN_THREADS: Final = 32

_CONFIG: Final = Config(
    connect_timeout=_SEND_SECONDS,
    read_timeout=_READ_SECONDS,
    max_pool_connections=64,
    retries={"total_max_attempts": 1},  # `retried` alone repeats requests
    s3={"payload_signing_enabled": False},  # over http it would hash every body; each is sent with its CRC32
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)

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
_CORRUPTED_REMEDY: Final = "check the network and any proxy before the server, then run again"
_UNREACHABLE: Final = "check AWS_ENDPOINT_URL, the network and that the server is up, then run again"


class S3Backend(Store):
    """Objects below `prefix` of `bucket`.

    Endpoint and region come from the environment; credentials too, unless they were handed to this process.

    Raises UserError: credentials are not set.
    """

    def __init__(self, url: str, bucket: str, prefix: str) -> None:
        super().__init__(url)
        self.root = f"{bucket}/{prefix}".rstrip("/")
        self.endpoint = s3_endpoint() or None
        self.keys = (_credential("AWS_ACCESS_KEY_ID"), _credential("AWS_SECRET_ACCESS_KEY"))
        self.token = secret("AWS_SESSION_TOKEN") or None
        self.region = s3_region() or "us-east-1"
        self.client = botocore.session.Session().create_client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint,
            aws_access_key_id=self.keys[0],
            aws_secret_access_key=self.keys[1],
            aws_session_token=self.token,
            config=_CONFIG,
        )
        self.known = False  # it has answered: from then on a failure is more likely temporary than a wrong URL
        self.bulk = Bulk(self.client, self._at, self.retried)

    def read(self, path: str) -> bytes:
        """As `Store.read`; botocore compares the bytes with the server's checksum."""

        def ask() -> bytes:
            with reading_body(self.client.get_object(**self._at(path), ChecksumMode="ENABLED")["Body"]) as body:
                return bytes(body.read())

        return self.retried(path, ask)

    def create(self, path: str, data: bytes) -> None:
        """As `Store.create`, by a conditional put; again if it met another put of the name (409), to see which won."""
        self._ask(path, "put_object", Body=data, IfNoneMatch="*", **body_headers([memoryview(data)]))

    def make_durable(self, path: str) -> None:
        """Nothing to do: S3 acknowledges a put once the object is durable."""

    def put_file(self, path: str, source: Path) -> None:
        self.bulk.put_file(path, source)

    def put_pieces(self, path: str, pieces: Content) -> None:
        self.bulk.put(path, pieces)

    def fetch_file(self, path: str, target: Path) -> str:
        return self.bulk.fetch(path, target, self.size(path))

    def size(self, path: str) -> int:
        return int(self._ask(path, "head_object")["ContentLength"])

    def children(self, prefix: str) -> list[str]:
        """As `Store.children`, from all pages of a listing."""
        bucket, _, key = self._below(prefix).partition("/")
        what = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", "Delimiter": "/"}
        pages = self.retried(prefix, lambda: list(self.client.get_paginator("list_objects_v2").paginate(**what)))
        found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        found += [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())]
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def remove(self, path: str) -> None:
        self._ask(path, "delete_object")

    def local(self, path: str) -> Path | None:
        return None

    def arrow(self) -> tuple[FileSystem, str]:
        """As `Store.arrow`; also raises Arrow's number of I/O threads for the whole process."""
        pa.set_io_thread_count(max(_SCAN_THREADS, pa.io_thread_count()))  # they wait for the network
        scheme, _, host = (self.endpoint or "").rpartition("://")
        filesystem = S3FileSystem(
            access_key=self.keys[0],
            secret_key=self.keys[1],
            session_token=self.token,
            region=self.region,
            endpoint_override=host or None,
            scheme=scheme or None,
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_READ_SECONDS,
        )
        return filesystem, self.root

    def uri(self, path: str) -> str:
        return f"s3://{self._below(path)}"

    def _below(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _at(self, path: str) -> dict[str, Any]:
        """The object as botocore's commands name it."""
        bucket, _, key = self._below(path).partition("/")
        return {"Bucket": bucket, "Key": key}

    def _ask(self, path: str, command: str, **what: Any) -> Any:
        return self.retried(path, lambda: getattr(self.client, command)(**self._at(path), **what))

    def retried(self, path: str, request: Callable[[], T]) -> T:
        """The answer of `request`, which may be repeated. Errors are StoreErrors, once retries have not helped."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                answer = request()
                self.known = True
                return answer
            except (BotoCoreError, ClientError) as error:
                attempt += 1
                failure = self._translate(path, error)
                self.known |= isinstance(failure, (Missing, Exists))
                torn, silent = isinstance(failure, _Corrupted), isinstance(error, ConnectTimeoutError)
                patient = self.known and not torn and time.monotonic() - started < RETRY_SECONDS
                tried = attempt >= (_CORRUPTED_ATTEMPTS if torn else 1 if silent else _ATTEMPTS)
                if not isinstance(failure, Unavailable) or (tried and not patient):
                    raise failure from error
            time.sleep(_pause(attempt))

    def _translate(self, path: str, error: Exception) -> Exception:
        code = str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""
        if code in ("PreconditionFailed", "412"):
            return Exists(path)
        if code in ("NoSuchKey", "NoSuchUpload", "404"):
            return Missing(self.uri(path))
        where, why = self.endpoint or "AWS", first_line(error)[:200]
        if isinstance(error, _CORRUPTED) or code in _ALTERED:
            return _Corrupted(
                f"{self.uri(path)} arrives incomplete or altered from {where} ({why}): {_CORRUPTED_REMEDY}."
            )
        if not code:
            return Unavailable(f"The store {self.uri('')} at {where} cannot be reached ({why}): {_UNREACHABLE}.")
        kind = StoreError if code in _REMEDIES else Unavailable
        remedy = _REMEDIES.get(code, _OTHER_REMEDY)
        return kind(f"The store at {where} refused {self.uri(path)} ({code}): {remedy}.")


class _Corrupted(Unavailable):
    """Bytes were lost or altered in transit."""


def _pause(attempt: int) -> float:
    """Seconds before the next attempt: exponential backoff with jitter."""
    return float(min(_LONGEST_PAUSE, 0.1 * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))


def _credential(name: str) -> str:
    if not (value := secret(name)):
        raise UserError(
            f"An s3:// store needs credentials, and {name} is not set: export it, have Prefect keep it for flow runs "
            "(`arealflow s3-keys`), or use a file:// store."
        )
    return value
