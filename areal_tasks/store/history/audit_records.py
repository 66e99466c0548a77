"""An audit's findings, and how it reads records: a defect is listed by the file's path, and the audit continues."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from areal_tasks.store.backend import Missing, Store, StoreError
from areal_tasks.store.commit import decode
from areal_tasks.store.search import last_present
from schemas.manifest import StoredRecord, seal_holds

R = TypeVar("R", bound=StoredRecord)


@dataclass(frozen=True)
class Defect:
    """A missing or damaged file, and what else it affects."""

    path: str
    what: str
    affects: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; also affected: {self.affects}" if self.affects else "")


@dataclass
class Findings:
    """The files that were checked so far, and their defects. Several threads may add to it."""

    store: Store
    defects: list[Defect] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    readers: dict[str, list[str]] = field(default_factory=dict)  # stage manifest -> manifests that read it
    names: dict[str, str] = field(default_factory=dict)  # stage manifest -> `verify of iteration 3`

    def report(self, path: str, what: str, affects: str = "") -> None:
        self.defects.append(Defect(path, what, affects))

    def record(self, path: str, model: type[R], sha256: str = "", named_by: str = "", affects: str = "") -> R | None:
        """The record at `path`; None, and a defect, if it is missing or altered."""
        data = self.read(path, affects, sha256)
        if data is None:
            return None
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            self.report(path, f"altered: its SHA-256 is not the one that {named_by} names", affects)
            return None
        return self.decode(path, model, data, affects)

    def read(self, path: str, affects: str = "", sha256: str = "") -> bytes | None:
        """The bytes at `path`; None, and a defect, if they cannot be read.

        Bytes with another digest or a broken seal are read again: they may have been corrupted in transit.
        """
        self.seen.add(path)
        try:
            data = self.store.read(path)
            return data if _plausible(path, data, sha256) else self.store.read(path)
        except Missing:
            self.report(path, "missing", affects)
        except StoreError as error:
            self.report(path, str(error), affects)
        return None

    def decode(self, path: str, model: type[R], data: bytes, affects: str = "") -> R | None:
        """The record in `data`; None, and a defect, if it holds none or its seal is broken."""
        try:
            return decode(self.store, path, model, data)
        except StoreError as error:
            what = str(error).removeprefix(self.store.uri(path)).split(". Restore")[0].strip()
            self.report(path, what, affects)
            return None

    def sequence(self, folder: str, path_of: Callable[[int], str], model: type[R], first: int) -> dict[int, R]:
        """The numbered records of `folder`; one that is missing before the last is a defect.

        The last is found by name; a listing, which may be stale, only adds records beyond a gap.
        """
        names = (name.removesuffix(".json") for name in self.store.children(folder))
        known = last_present(lambda n: self.store.exists(path_of(n)), first)
        numbers = [*(int(name) for name in names if name.isdecimal()), known]
        found = {n: self.record(path_of(n), model) for n in range(first, max(numbers, default=first - 1) + 1)}
        for n, record in found.items():
            if record is not None and getattr(record, "n", n) != n:
                self.report(path_of(n), f"holds record {getattr(record, 'n', n)}, not {n}")
        return {n: record for n, record in found.items() if record is not None}

    def folder(self, folder: str, model: type[R]) -> dict[str, R]:
        """The records directly in `folder`, by path."""
        paths = [f"{folder}/{name}" for name in self.store.children(folder) if name.endswith(".json")]
        found = {path: self.record(path, model) for path in paths}
        return {path: record for path, record in found.items() if record is not None}

    def downstream(self, manifest: str) -> str:
        """The stages that were computed from a stage manifest's tables, directly or indirectly."""
        found: list[str] = []
        queue = list(self.readers.get(manifest, ()))
        while queue:
            path = queue.pop(0)
            if path not in found:
                found.append(path)
                queue += self.readers.get(path, ())
        return _listed([self.names.get(path, path) for path in found])


def _plausible(path: str, data: bytes, sha256: str) -> bool:
    """Whether `data` has the given SHA-256; without one, whether a record's seal holds."""
    if sha256:
        return hashlib.sha256(data).hexdigest() == sha256
    return seal_holds(data) if path.endswith(".json") else True


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
