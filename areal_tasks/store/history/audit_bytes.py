"""Checks of every byte that manifests name: shards and their columns, weights, checkpoints, compactions."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from areal_tasks.store.backend import Missing, StoreError
from areal_tasks.store.history.audit_records import Findings
from areal_tasks.store.objects.inventory import file_digest
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import content_digest
from schemas.manifest import FileRef, ShardRef, TableRef

#: Called with the bytes hashed so far, and all bytes to be hashed.
Progress = Callable[[int, int], None]


@dataclass
class Work:
    """A queue of checks of bytes, each made once; run by several threads, since hashing and reading release the GIL."""

    found: Findings
    progress: Progress = field(default=lambda done, total: None)
    jobs: list[Callable[[], None]] = field(default_factory=list)
    total: int = 0
    done: int = 0
    files: int = 0
    groups: dict[str, Counter[int]] = field(default_factory=dict)  # rows by group, of the shards of tables `rollout`
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_table(self, manifest: str, ref: TableRef) -> None:
        """Queue the shards of a table of the stage manifest at `manifest`."""
        if self._claim(*ref.shards):
            self.jobs.append(partial(self._table, manifest, ref))

    def add_file(self, file: FileRef, named_by: str, affects: str) -> None:
        """Queue a file of any size, to check its length and SHA-256."""
        if self._claim(file):
            self.jobs.append(partial(self._file, file, named_by, affects))

    def __call__(self) -> None:
        """Run all queued checks."""
        self.progress(0, self.total)
        parallel(lambda job: job(), self.jobs, threads=8)

    def _claim(self, *files: FileRef) -> bool:
        """Mark these files as seen; returns whether any of them is new."""
        fresh = [file for file in files if file.path not in self.found.seen]
        self.found.seen.update(file.path for file in fresh)
        self.total += sum(file.bytes for file in fresh)
        self.files += len(fresh)
        return bool(fresh)

    def _tick(self, read: int) -> None:
        with self.lock:
            self.done += read
            self.progress(self.done, self.total)

    def _table(self, manifest: str, ref: TableRef) -> None:
        affects = self.found.downstream(manifest)
        parts = [self._shard(shard, manifest, affects) for shard in ref.shards]
        sound = [part for part in parts if part is not None]
        if len(sound) < len(parts):
            return
        if ref.name == "rollout":
            self.groups |= {s.path: _groups(part) for s, part in zip(ref.shards, sound, strict=True)}
        table = pa.concat_tables(sound)
        if table.num_rows != ref.rows:
            self.found.report(
                manifest, f"names {ref.rows} rows of {ref.name}; its shards hold {table.num_rows}", affects
            )
        elif content_digest(table) != ref.digest:
            self.found.report(manifest, f"the columns of {ref.name} do not have the content digest it names", affects)

    def _shard(self, shard: ShardRef, manifest: str, affects: str) -> pa.Table | None:
        data = self.found.read(shard.path, affects, shard.sha256)
        if data is None:
            return None
        self._tick(len(data))
        if not self._same(shard, hashlib.sha256(data).hexdigest(), len(data), manifest, affects):
            return None
        try:
            return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        except (pa.ArrowException, OSError) as error:
            self.found.report(shard.path, f"is not a readable Parquet file ({error})", affects)
            return None

    def _file(self, file: FileRef, named_by: str, affects: str) -> None:
        try:
            digest, size = file_digest(self.found.store, file.path, self._tick)
            if digest != file.sha256:  # it may have been corrupted in transit
                digest, size = file_digest(self.found.store, file.path)
        except Missing:
            self.found.report(file.path, "missing", affects)
        except StoreError as error:
            self.found.report(file.path, str(error), affects)
        else:
            self._same(file, digest, size, named_by, affects)

    def _same(self, file: FileRef, sha256: str, size: int, named_by: str, affects: str) -> bool:
        if size != file.bytes:
            self.found.report(file.path, f"holds {size} bytes, not the {file.bytes} that {named_by} names", affects)
        elif sha256 != file.sha256:
            self.found.report(file.path, f"altered: its SHA-256 is not the one that {named_by} names", affects)
        return (size, sha256) == (file.bytes, file.sha256)


def _groups(rows: pa.Table) -> Counter[int]:
    counted = rows["group_id"].value_counts()
    return Counter({row["values"]: row["counts"] for row in counted.to_pylist()})
