"""Object storage: a small interface over a local folder or an S3 bucket.

A backend needs only create-if-absent and reads: no locks, no renames, no clocks, no complete listings.
Paths are relative to the store's root and use `/`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from pyarrow.fs import FileSystem

from areal_tasks.store.under_way import LEDGER
from schemas.errors import UserError
from schemas.recipe.sources import holds_credentials

#: The bytes of a large object, in pieces anywhere in memory.
Content = Sequence[bytes | memoryview]
#: Each value has two environment variables; the first that is set counts.
_ENDPOINT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGION: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


class StoreError(UserError):
    """The store refused or failed; the message says where, why and what to do."""


class Unavailable(StoreError):
    """The store does not answer, or is overloaded: it may recover by itself."""


class Missing(StoreError):
    """There is no object under this path."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"{where} does not exist. Is the name right, and is this the right store (--store)?")


class Newer(StoreError):
    """A newer version of this program wrote this record: it is not damaged."""

    def __init__(self, where: str, version: int, known: int) -> None:
        super().__init__(
            f"{where} was written by a newer arealflow (schema {version}; this one reads {known}): upgrade."
        )


class Exists(Exception):
    """The object exists already, so that `create` did nothing."""


class Backend(Protocol):
    """The operations of a store. Every failure is a `StoreError`."""

    def read(self, path: str) -> bytes:
        """The whole object, or `Missing`."""

    def create(self, path: str, data: bytes) -> None:
        """Write a whole object if there is none; else `Exists`. Readers see all of it or nothing."""

    def settle(self, path: str) -> None:
        """Make a created object, and all that was written before it, survive a power cut."""

    def put(self, path: str, data: bytes) -> None:
        """Write a durable object under a name that no other process uses (below a fresh attempt)."""

    def put_file(self, path: str, source: Path) -> None:
        """As `put`, from a local file of any size."""

    def put_pieces(self, path: str, pieces: Content) -> None:
        """As `put`, from concatenated pieces of any size, which are not copied first."""

    def fetch_file(self, path: str, target: Path) -> str:
        """Copy an object of any size into a local file, or `Missing`; returns its SHA-256 in hex."""

    def size(self, path: str) -> int:
        """Bytes of the object, or `Missing`."""

    def children(self, prefix: str) -> list[str]:
        """Names directly below the folder `prefix` (`""`: the root), sorted."""

    def local(self, path: str) -> Path | None:
        """Where `path` lies on this machine's disk; None for a remote store."""

    def arrow(self) -> tuple[FileSystem, str]:
        """The store for Arrow, which scans many files: its file system, and the root in it."""

    def uri(self, path: str) -> str:
        """`path` as messages name it."""

    def list(self, prefix: str) -> list[str]:
        """Paths of all objects below the folder `prefix`, sorted; empty if there is none."""


@dataclass(frozen=True)
class Store:
    """A store: its URL and its backend, whose operations are listed in the ledger while they run."""

    url: str
    backend: Backend

    def read(self, path: str) -> bytes:
        with LEDGER.entry("read", self.uri(path)):
            return self.backend.read(path)

    def create(self, path: str, data: bytes) -> None:
        with LEDGER.entry("create", self.uri(path)):
            self.backend.create(path, data)

    def settle(self, path: str) -> None:
        with LEDGER.entry("settle", self.uri(path)):
            self.backend.settle(path)

    def put(self, path: str, data: bytes) -> None:
        with LEDGER.entry("put", self.uri(path)):
            self.backend.put(path, data)

    def put_file(self, path: str, source: Path) -> None:
        with LEDGER.entry("put_file", self.uri(path)):
            self.backend.put_file(path, source)

    def put_pieces(self, path: str, pieces: Content) -> None:
        with LEDGER.entry("put_pieces", self.uri(path)):
            self.backend.put_pieces(path, pieces)

    def fetch_file(self, path: str, target: Path) -> str:
        with LEDGER.entry("fetch_file", self.uri(path)):
            return self.backend.fetch_file(path, target)

    def exists(self, path: str) -> bool:
        """Whether there is an object under this path."""
        try:
            self.size(path)
        except Missing:
            return False
        return True

    def size(self, path: str) -> int:
        with LEDGER.entry("size", self.uri(path)):
            return self.backend.size(path)

    def children(self, prefix: str) -> list[str]:
        with LEDGER.entry("children", self.uri(prefix)):
            return self.backend.children(prefix)

    def local(self, path: str) -> Path | None:
        return self.backend.local(path)

    def arrow(self) -> tuple[FileSystem, str]:
        return self.backend.arrow()

    def uri(self, path: str) -> str:
        return self.backend.uri(path)

    def list(self, prefix: str) -> list[str]:
        with LEDGER.entry("list", self.uri(prefix)):
            return self.backend.list(prefix)


def default_url() -> str:
    """`AREALFLOW_STORE`, else the folder `store` in `AREALFLOW_HOME` (default: `./.arealflow`)."""
    home = Path(os.environ.get("AREALFLOW_HOME", ".arealflow"))
    return os.environ.get("AREALFLOW_STORE") or (home.resolve() / "store").as_uri()


def store_url(named: str) -> str:
    """The URL of a store that is given as a URL, or as a folder, relative to the current one."""
    is_path = named and not urlsplit(named).scheme
    return Path(os.path.abspath(os.path.expanduser(named))).as_uri() if is_path else named


def open_store(named: str = "") -> Store:
    """The store at this URL or folder (empty: the default one). Accesses neither disk nor network yet.

    Raises:
        UserError: it is neither a folder nor a URL `file:///…` or `s3://bucket/…`, the URL holds credentials, or S3
            credentials are not set.
    """
    url = store_url(named or default_url()).rstrip("/")
    parts = urlsplit(url)
    if holds_credentials(url):
        raise UserError(
            "The store's URL holds credentials, which logs and process lists would show: name it without them, and put "
            "them into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)."
        )
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        from areal_tasks.store.objects.local import LocalBackend

        return Store(url, LocalBackend(Path(unquote(parts.path))))
    if parts.scheme == "s3" and parts.netloc:
        from areal_tasks.store.objects.s3 import S3Backend  # s3fs takes half a second to import

        return Store(url, S3Backend(parts.netloc, parts.path.strip("/")))
    raise UserError(f"Store {named!r} is not supported: name a folder, file:///absolute/folder or s3://bucket/prefix.")


def s3_endpoint() -> str:
    """The URL of the S3 server, from the environment; empty for AWS."""
    return _environment(_ENDPOINT)


def s3_region() -> str:
    """The region; empty if the environment names none."""
    return _environment(_REGION)


def _environment(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
