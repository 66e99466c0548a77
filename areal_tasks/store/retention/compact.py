"""Making compactions: many iterations' tables, commits and manifests merged into few files, verified as they are read.

A compaction is derived and can be deleted at any time: readers use it where it is faster, and its source files stay
authoritative.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store import paths
from areal_tasks.store.backend import Exists, Store
from areal_tasks.store.catalog import DERIVED, Catalog, Region, compact_schema, list_compactions, shard_refs
from areal_tasks.store.commit import bytes_digest, new_attempt
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import encode, read_shard
from schemas.compaction import SCALAR_TABLES, CompactFile, Compaction, CompactTable
from schemas.errors import UserError
from schemas.manifest import ShardRef
from schemas.tables import REPEATED

log = logging.getLogger(__name__)

#: How long the end of a run waits for its last compaction.
CLOSE_SECONDS: Final = 600.0
_FILE_ROWS: Final = 1 << 20
_FILE_BYTES: Final = 512 << 20  # in memory
_GROUP_ROWS: Final = 1 << 18
_GROUP_BYTES: Final = 128 << 20
_GROWTH: Final = 2  # a compaction shorter than this many times what follows it is merged with it
_AT_ONCE: Final = 32  # plain shards in memory
_ITERATIONS: Final = 256  # of which the manifests are in memory


def compact(catalog: Catalog, regions: Sequence[Region], tables: Sequence[str] = SCALAR_TABLES) -> Compaction:
    """Merge consecutive regions of the catalog into a compaction that covers all their iterations.

    Raises UserError: a file of the run is damaged, or the store cannot be written.
    """
    run, attempt, started = catalog.run, new_attempt(), now()
    first, stop = regions[0].first, regions[-1].stop
    record = Compaction(
        run=run.name,
        first=first,
        stop=stop,
        attempt=attempt,
        last=bytes_digest(run.store, run.commit_path(stop - 1)),
        stages_of={table: tuple(sorted(stages)) for table, stages in catalog.stages_of.items()},
        tables=_merged(catalog, regions, tables, paths.compact_attempt(run.name, attempt)),
        provenance=make_provenance(run.owner, started),
    )
    before = [c.generation for c in list_compactions(run.store, run.name) if (c.first, c.stop) == (first, stop)]
    path = paths.compaction(run.name, first, stop, max(before, default=0) + 1, record.attempt)
    with suppress(Exists):  # the name holds the attempt: only this put, when repeated, finds one
        run.store.create(path, record.encode(path))
    return record


def _merged(catalog: Catalog, regions: Sequence[Region], tables: Sequence[str], folder: str) -> dict[str, CompactTable]:
    """The merged tables, in files in `folder`. The manifests come first: they name the shards of the others."""
    parts = [part for region in regions for part in _parts(region)]
    derived = [{name: catalog.rows(name, [replace(part)]) for name in DERIVED} for part in parts]
    rows: dict[str, Iterable[pa.Table]] = {name: [one[name] for one in derived] for name in DERIVED}
    shards = [one["shards"] for one in derived]
    rows |= {name: _rows(catalog, name, parts, shards) for name in tables if name in catalog.stages_of}
    return {name: _write(catalog.run.store, name, found, f"{folder}/{name}") for name, found in rows.items()}


def _parts(region: Region) -> Iterable[Region]:
    """A plain region in pieces whose manifests fit into memory together."""
    if region.compaction is not None:
        return [region]
    starts = range(region.first, region.stop, _ITERATIONS)
    return (Region(region.run, k, min(k + _ITERATIONS, region.stop)) for k in starts)


def _rows(catalog: Catalog, name: str, parts: Sequence[Region], shards: Sequence[pa.Table]) -> Iterator[pa.Table]:
    """The rows of a table in each of `parts`, every byte verified; `shards` lists all shards of each."""
    store, schema = catalog.run.store, compact_schema(name)
    threads = _AT_ONCE if store.local("") is None else 2  # local reads gain nothing from more
    for part, its_shards in zip(parts, shards, strict=True):
        if (merged := catalog.merged(part, name)) is not None:
            yield from merged
            continue
        plain = shard_refs(its_shards.filter(ds.field("table_name") == name))
        for start in range(0, len(plain), _AT_ONCE):
            some = plain[start : start + _AT_ONCE]
            yield pa.concat_tables(parallel(lambda found: _shard_rows(store, *found, schema), some, threads))


def _shard_rows(store: Store, iteration: int, shard: ShardRef, schema: pa.Schema) -> pa.Table:
    table = read_shard(store, shard)
    given = {name: table[name] for name in table.column_names}
    given["iteration"] = pa.array([iteration] * len(table), pa.int32())
    columns = [given[f.name].cast(f.type) if f.name in given else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, schema=schema)


def _write(store: Store, name: str, parts: Iterable[pa.Table], prefix: str) -> CompactTable:
    files = (_write_file(store, f"{prefix}-{i:05d}.parquet", rows) for i, rows in enumerate(_filled(parts)))
    return CompactTable(columns=tuple(compact_schema(name).names), files=tuple(files))


def _filled(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows of `parts` in tables as large as a merged file should be."""
    held, rows, size = list[pa.Table](), 0, 0
    for part in filter(len, parts):
        held.append(part)
        rows, size = rows + len(part), size + part.nbytes
        if rows >= _FILE_ROWS or size >= _FILE_BYTES:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _write_file(store: Store, path: str, table: pa.Table) -> CompactFile:
    """Unlike a shard, a merged file has large row groups for scans, and dictionaries of texts that repeat."""
    row_bytes = table.nbytes // max(len(table), 1) + 1
    data = encode(
        table,
        row_group_size=max(1, min(_GROUP_ROWS, _GROUP_BYTES // row_bytes)),
        use_dictionary=[name for name in table.column_names if name in REPEATED] or False,
        write_statistics=[f.name for f in table.schema if pa.types.is_integer(f.type)],
    )
    store.put(path, data)
    return CompactFile(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), rows=len(table))


def compact_all(run: Run, tables: Sequence[str] = SCALAR_TABLES) -> Compaction:
    """Merge a run's whole history, whether or not parts of it are compacted.

    Raises UserError: nothing is committed, or as `compact`.
    """
    catalog = Catalog(run)
    if not catalog.regions:
        raise UserError(f"Run {run.name!r} has no committed iteration: there is nothing to compact.")
    return compact(catalog, catalog.regions, tables)


# ── when ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def regions_to_merge(regions: Sequence[Region], every: int) -> Sequence[Region]:
    """The last regions, if it is time to merge them: at least `every` iterations at the end are not compacted.

    Shorter compactions before them are merged too, so that a run of n iterations has about log(n) compactions, and
    each row is rewritten about log(n) times.
    """
    if not regions or regions[-1].compaction is not None or _length(regions[-1:]) < every:
        return ()
    start = len(regions) - 1
    while start > 0 and _joins(regions[start - 1], _length(regions[start:])):
        start -= 1
    return regions[start:]


def _joins(before: Region, length: int) -> bool:
    if before.compaction is None:  # its compaction is not valid
        return True
    small = before.compaction.tables.keys() <= {*SCALAR_TABLES, *DERIVED}
    return small and before.stop - before.first < _GROWTH * length


def _length(regions: Sequence[Region]) -> int:
    return regions[-1].stop - regions[0].first


class Compactor(AbstractContextManager["Compactor"]):
    """A context manager that compacts a run in a thread, every `every` iterations (0: never).

    A failure is logged, and the next attempt follows `every` iterations later: the run does not depend on it.
    """

    def __init__(self, run: Run, every: int) -> None:
        self.run, self.every = run, every
        self.waited = every  # the first commit after a start also compacts what an earlier start left
        self.thread: threading.Thread | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.thread is not None and kind is None:  # a run that fails or is cancelled does not wait
            self.thread.join(CLOSE_SECONDS)
            if self.thread.is_alive():
                log.warning("run %s ends before its compaction: `arealflow compact %s` makes it", *[self.run.name] * 2)

    def committed(self) -> None:
        """Called after each commit; starts a compaction every `every` iterations."""
        self.waited += 1
        if self.every and self.waited >= self.every and not (self.thread and self.thread.is_alive()):
            self.waited = 0
            self.thread = threading.Thread(target=self._work, name="compaction", daemon=True)
            self.thread.start()

    def _work(self) -> None:
        try:
            catalog = Catalog(self.run)
            regions = regions_to_merge(catalog.regions, self.every)
            if regions:
                compact(catalog, regions)
        except (UserError, OSError, pa.ArrowException) as error:
            log.warning("run %s could not be compacted, its queries take longer: %s", self.run.name, error)
