"""An audit's findings, and how it reads records and the files that they name: shards and their columns, weights,
checkpoints, compactions. A defect is listed by the file's path, and the audit continues.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pyarrow as pa

from areal_tasks.store.backend import Missing, Store, StoreError, damaged
from areal_tasks.store.commit import last_number, listed_numbers, read_record
from areal_tasks.store.objects.inventory import check_sha256
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import content_digest, read_shard
from schemas.manifest import FileRef, RunRecord, TableRef
from schemas.record import SEALED_PATH, StoredRecord

R = TypeVar("R", bound=StoredRecord)
T = TypeVar("T")


@dataclass(frozen=True)
class Defect:
    """A missing or damaged file, and what else it affects."""

    path: str
    what: str
    affects: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; also affected: {self.affects}" if self.affects else "")


#: Called with the bytes hashed so far, and all bytes to be hashed.
Progress = Callable[[int, int], None]


@dataclass
class Findings:
    """The files that an audit has seen, their defects, and a queue of checks of whole files, each made once.

    Records are checked at once. The queue is run by several threads, since hashing and reading release the GIL.
    """

    store: Store
    progress: Progress
    defects: list[Defect] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    readers: dict[str, list[str]] = field(default_factory=dict)  # stage manifest -> manifests that read it
    names: dict[str, str] = field(default_factory=dict)  # stage manifest -> `verify of iteration 3`
    groups: dict[str, Counter[int]] = field(default_factory=dict)  # rows by group, of the shards of tables `rollout`
    schemas: dict[str, int] = field(default_factory=dict)  # of each run's `run.json`
    owners: dict[str, set[int]] = field(default_factory=dict)  # those that a run's records name
    queue: list[Callable[[], object]] = field(default_factory=list)
    total: int = 0  # bytes to be hashed
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, path: str, what: str, affects: str = "") -> None:
        self.defects.append(Defect(path, what, affects))

    def attempt(self, path: str, affects: str, read: Callable[[], T]) -> T | None:
        """What `read` returns of the file at `path`; None, and a defect, if that is missing or damaged."""
        self.seen.add(path)
        try:
            return read()
        except Missing:
            self.report(path, "missing", affects)
        except (StoreError, pa.ArrowException, OSError) as error:
            what = str(error).removeprefix(self.store.uri(path)).split(". Restore")[0].strip()
            self.report(path, what, affects)
        return None

    def record(self, path: str, model: type[R], sha256: str = "", affects: str = "") -> R | None:
        """The record at `path`; None, and a defect, if it is missing or damaged."""

        def read() -> R:
            return self.checked(path, read_record(self.store, path, model, sha256 or None))

        return self.attempt(path, affects, read)

    def checked(self, path: str, record: R) -> R:
        """The record, whose owner is noted, if no seal without its path has been put in the place of one with it.

        A program that does not know the schema of `run.json` writes nothing into that run.
        """
        run, schema = path.split("/")[0], record.schema_version
        if isinstance(record, RunRecord):
            self.schemas[run] = schema
        if schema < SEALED_PATH <= self.schemas.get(run, 0):
            raise damaged(self.store, path, f"it is of schema {schema}, before which its run did not exist")
        made, details = getattr(record, "provenance", None), getattr(record, "details", {})
        self.owners.setdefault(run, set()).add(made.owner if made else int(details.get("owner", 0)))
        return record

    def sequence(self, path_of: Callable[[int], str], model: type[R], first: int, named: int = -1) -> dict[int, R]:
        """The numbered records from `first` on; one that is missing before the last is a defect.

        The last is found by name; a listing, which may be stale, only adds records beyond a gap. `named`: the largest
        number that another record names.
        """
        numbers = [*listed_numbers(self.store, path_of), last_number(self.store, path_of, first), named]
        found = {n: self.record(path_of(n), model) for n in range(first, max(numbers) + 1)}
        for n, record in found.items():
            if record is not None and getattr(record, "n", n) != n:
                self.report(path_of(n), f"holds record {getattr(record, 'n', n)}, not {n}")
        return {n: record for n, record in found.items() if record is not None}

    def folder(self, folder: str, model: type[R], affects: str = "") -> dict[str, R]:
        """The records directly in `folder`, by path."""
        paths = [f"{folder}/{name}" for name in self.store.children(folder) if name.endswith(".json")]
        found = {path: self.record(path, model, affects=affects) for path in paths}
        return {path: record for path, record in found.items() if record is not None}

    def downstream(self, manifest: str) -> str:
        """The stages that were computed from a stage manifest's tables, directly or indirectly."""
        found = [*dict.fromkeys(self.readers.get(manifest, ()))]
        for path in found:  # which grows meanwhile
            found += [reader for reader in dict.fromkeys(self.readers.get(path, ())) if reader not in found]
        names = [self.names.get(path, path) for path in found]
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

    # ── whole files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def add_table(self, manifest: str, ref: TableRef) -> None:
        """Queue the shards of a table of the stage manifest at `manifest`."""
        if self._claim(*ref.shards):
            self.queue.append(partial(self._table, manifest, ref))

    def add_file(self, file: FileRef, affects: str) -> None:
        """Queue a file of any size, to check its length and SHA-256."""
        if self._claim(file):
            check = partial(check_sha256, self.store, file, self._tick)
            self.queue.append(lambda: self.attempt(file.path, affects, check))

    def check_queued(self) -> None:
        self.progress(0, self.total)
        parallel(lambda job: job(), self.queue, threads=8)

    def _claim(self, *files: FileRef) -> bool:
        """Mark these files as seen; returns whether any of them is new."""
        fresh = [file for file in files if file.path not in self.seen]
        self.seen.update(file.path for file in fresh)
        self.total += sum(file.bytes for file in fresh)
        return bool(fresh)

    def _tick(self, read: int) -> None:
        with self.lock:
            self.done += read
            self.progress(self.done, self.total)

    def _table(self, manifest: str, ref: TableRef) -> None:
        affects = self.downstream(manifest)
        parts = [self.attempt(s.path, affects, partial(read_shard, self.store, s)) for s in ref.shards]
        self._tick(sum(shard.bytes for shard in ref.shards))
        sound = [part for part in parts if part is not None]
        if len(sound) < len(parts):
            return
        if ref.name == "rollout":
            self.groups |= {s.path: _groups(part) for s, part in zip(ref.shards, sound, strict=True)}
        table = pa.concat_tables(sound)
        if table.num_rows != ref.rows:
            self.report(manifest, f"names {ref.rows} rows of {ref.name}; its shards hold {table.num_rows}", affects)
        elif content_digest(table) != ref.digest:
            self.report(manifest, f"the columns of {ref.name} do not have the content digest it names", affects)


def _groups(rows: pa.Table) -> Counter[int]:
    counted = rows["group_id"].value_counts()
    return Counter({row["values"]: row["counts"] for row in counted.to_pylist()})
