"""Object storage: a small interface over a local folder or an S3 bucket.

A backend needs only create-if-absent and reads: no locks, no renames, no clocks, no complete listings.
Paths are relative to the store's root and use `/`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from pyarrow.fs import FileSystem

from areal_tasks.store.in_flight import LEDGER
from schemas.errors import UserError
from schemas.recipe.sources import holds_credentials, local_path, s3_place
from schemas.record import SCHEMA_VERSION

#: The bytes of a large object, in pieces anywhere in memory.
Content = Sequence[bytes | memoryview]


class StoreError(UserError):
    """The store refused or failed; the message says where, why and what to do."""


class Unavailable(StoreError):
    """The store does not answer, or is overloaded: it may recover by itself."""


class Missing(StoreError):
    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"{where} does not exist. Is the name right, and is this the right store (--store)?")


class NewerSchema(StoreError):
    """A newer version of this program wrote this record: it is not damaged."""

    def __init__(self, where: str, version: int) -> None:
        super().__init__(
            f"{where} was written by a newer arealflow (schema {version}; this one reads {SCHEMA_VERSION}): upgrade."
        )


class Exists(Exception):
    """The object exists already, so that `create` did nothing."""


def tracked(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation of a store, which the ledger of `in_flight` lists while it runs."""

    @wraps(operation)
    def run(store: Store, path: str, *arguments: Any) -> Any:
        with LEDGER.entry(operation.__name__, store.uri(path)):
            return operation(store, path, *arguments)

    return run


class Store(ABC):
    """A store at a URL. Every failure is a `StoreError`. The ledger of `in_flight` lists `TRACKED` ones."""

    TRACKED: ClassVar = ("read", "create", "make_durable", "put_file", "put_pieces", "fetch_file", "size", "children")

    def __init__(self, url: str) -> None:
        self.url = url

    def __init_subclass__(cls) -> None:
        for name in cls.TRACKED:
            setattr(cls, name, tracked(getattr(cls, name)))

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole object, or `Missing`."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write a whole object if there is none; else `Exists`. Readers see all of it or nothing."""

    @abstractmethod
    def make_durable(self, path: str) -> None:
        """Make a created object, and all that was written before it, survive a power cut."""

    @abstractmethod
    def put_pieces(self, path: str, pieces: Content) -> None:
        """Write a durable object of the concatenated pieces, which are not copied first.

        No other process uses its name, which is below a fresh attempt.
        """

    @abstractmethod
    def put_file(self, path: str, source: Path) -> None:
        """As `put_pieces`, from a local file of any size."""

    @abstractmethod
    def fetch_file(self, path: str, target: Path) -> str:
        """Copy an object of any size into a local file, or `Missing`; returns its SHA-256 in hex."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of the object, or `Missing`."""

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """Names directly below the folder `prefix` (`""`: the root), sorted."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove an object permanently, for `gc`; a missing one is no error."""

    @abstractmethod
    def local(self, path: str) -> Path | None:
        """Where `path` lies on this machine's disk; None for a remote store."""

    @abstractmethod
    def arrow(self) -> tuple[FileSystem, str]:
        """The store for Arrow, which scans many files: its file system, and the root in it."""

    @abstractmethod
    def uri(self, path: str) -> str:
        """`path` as messages name it."""

    def put(self, path: str, data: bytes) -> None:
        self.put_pieces(path, [data])

    def exists(self, path: str) -> bool:
        """Whether there is an object under this path."""
        try:
            self.size(path)
        except Missing:
            return False
        return True


def damaged(store: Store, path: str, how: str) -> StoreError:
    """The error for a file whose bytes are not those that were recorded for it."""
    return StoreError(
        f"{store.uri(path)} is damaged: {how}. Restore this file from a backup; every other file is unharmed."
    )


def default_url() -> str:
    """`AREALFLOW_STORE`, else the folder `store` in `AREALFLOW_HOME` (default: `./.arealflow`)."""
    home = Path(os.environ.get("AREALFLOW_HOME", ".arealflow"))
    return os.environ.get("AREALFLOW_STORE") or (home.resolve() / "store").as_uri()


def store_url(named: str) -> str:
    """The URL of a store that is given as a URL, or as a folder, relative to the current one."""
    is_path = named and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", named)
    return Path(os.path.abspath(os.path.expanduser(named))).as_uri() if is_path else named


def open_store(named: str = "") -> Store:
    """The store at this URL or folder (empty: the default one). Accesses neither disk nor network yet.

    Raises UserError: it is neither a folder nor a URL `file:///…` or `s3://bucket/…`, the URL holds credentials, or S3
    credentials are not set.
    """
    try:
        url = store_url(named or default_url()).rstrip("/")
        path = local_path(url) if url.startswith("file:") else None
        possible = b"\0" not in (path or url).encode(errors="surrogateescape")
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise UserError(f"Store {named!r} is not supported: it has characters that no name of a file can have.")
    if holds_credentials(url):
        raise UserError(
            "The store's URL holds credentials, which logs and process lists would show: name it without them, and put "
            "them into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)."
        )
    if path:
        from areal_tasks.store.objects.local import LocalBackend

        return LocalBackend(url, Path(path))
    if place := s3_place(url):
        from areal_tasks.store.objects.s3 import S3Backend  # botocore takes a tenth of a second to import

        return S3Backend(url, *place)
    raise UserError(f"Store {named!r} is not supported: name a folder, file:///absolute/folder or s3://bucket/prefix.")


def s3_endpoint() -> str:
    """The URL of the S3 server, from the environment; empty for AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def s3_region() -> str:
    """The region; empty if the environment names none."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
