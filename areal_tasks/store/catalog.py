"""The catalog of a run: the stage manifests that its commits select, and nothing else.

A catalog is a list of regions. A region with a valid compaction is read from that; the others, above all the newest
iterations, are read from the commits and manifests themselves. Both give the same rows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import bytes_digest, read_record
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import utc
from areal_tasks.store.reachable import Reached, reachable
from areal_tasks.store.runs import Run
from areal_tasks.store.scan import read_file
from schemas.compaction import CompactFile, Compaction
from schemas.manifest import IterationCommit, Provenance, ShardRef, StageManifest, StageRef
from schemas.tables import TABLES
from schemas.views import COMMITS, SHARDS, STAGES

log = logging.getLogger(__name__)

DERIVED: Final = {"commits": COMMITS, "stages": STAGES, "shards": SHARDS}
_COMPACTION: Final = re.compile(r"(\d{6,})-(\d{6,})-(\d{3,})-[0-9a-f]+\.json")  # of an attempt; formerly a digest


@dataclass(frozen=True)
class Selected:
    """A stage manifest, its path, and the first commit that selects it."""

    path: str
    manifest: StageManifest
    commit: IterationCommit


@dataclass(frozen=True)
class Region:
    """A range of iterations, `first` to `stop` - 1, with the compaction that covers exactly them, if there is one."""

    run: Run
    first: int
    stop: int
    compaction: Compaction | None = None
    known: dict[str, Selected] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def commits(self) -> list[IterationCommit]:
        return self.run.commits(self.first, self.stop)

    @cached_property
    def refs(self) -> Reached[StageRef]:
        """Path of every manifest first selected in this region -> its reference and the first commit with it."""
        known = {ref.path for ref in self.run.commit(self.first - 1).stages} if self.first else set()
        return {path: found for path, found in reachable(self.commits, StageRef).items() if path not in known}

    def selected(self, stages: Set[str] | None = None) -> list[Selected]:
        """The manifests first selected in this region, of these stages (None: of all). Each is read once."""
        wanted = [path for path, (ref, _) in self.refs.items() if stages is None or ref.stage in stages]
        fresh = [path for path in wanted if path not in self.known]
        read = parallel(lambda path: self.run.read_stage(self.refs[path][0]), fresh)
        for path, manifest in zip(fresh, read, strict=True):
            self.known[path] = Selected(path, manifest, self.refs[path][1])
        return [self.known[path] for path in wanted]

    def merged(self, table: str) -> Sequence[CompactFile] | None:
        """The files of the merged table, if there is one with the columns that this version has."""
        found = self.compaction.tables.get(table) if self.compaction else None
        return found.files if found and found.columns == tuple(compact_schema(table).names) else None


@dataclass
class Catalog:
    """A run's history up to its head, read lazily. Without `compacted`, tables in compactions are ignored."""

    run: Run
    compacted: bool = True

    @cached_property
    def regions(self) -> list[Region]:
        """The whole history, in order and without gaps."""
        found, at = list[Region](), 0
        for compaction in valid_compactions(self.run) if self.compacted else []:
            if compaction.first > at:
                found.append(Region(self.run, at, compaction.first))
            found.append(Region(self.run, compaction.first, compaction.stop, compaction))
            at = compaction.stop
        stop = self.run.checked_committed()
        return [*found, Region(self.run, at, stop)] if stop > at else found

    @cached_property
    def stages_of(self) -> dict[str, set[str]]:
        """Table name -> the stages that write it: a stage always writes the same ones, so one manifest each is read."""
        found: dict[str, set[str]] = {}
        for region in self.regions:
            for table, stages in (region.compaction.stages_of if region.compaction else {}).items():
                found.setdefault(table, set()).update(stages)
        known = set().union(*found.values())
        plain = [region for region in self.regions if region.compaction is None]
        one_each = {ref.stage: ref for region in plain for ref, _ in region.refs.values() if ref.stage not in known}
        for manifest in parallel(self.run.read_stage, list(one_each.values())):
            for table in manifest.tables:
                found.setdefault(table, set()).add(manifest.stage)
        return found

    def shards(self, region: Region, table: str) -> list[tuple[int, ShardRef]]:
        """The shards of a table in a region, with their iterations, in order."""
        merged = self.merged(region, "shards", ds.field("table_name") == table)
        if merged is not None:
            return [shard for part in merged for shard in shard_refs(part)]
        manifests = [found.manifest for found in region.selected(self.stages_of[table])]
        return [(m.iteration, shard) for m in manifests if table in m.tables for shard in m.tables[table].shards]

    def merged(self, region: Region, table: str, filter: ds.Expression | None = None) -> list[pa.Table] | None:
        """The region's rows of a table in its compaction; None if they must be read from its source files."""
        files, schema = region.merged(table) if self.compacted else None, compact_schema(table)
        try:
            return None if files is None else [read_file(self.run.store, file, schema, filter) for file in files]
        except StoreError as error:
            self.ignore_compactions(error)
            return None

    def ignore_compactions(self, damage: Exception) -> None:
        """Read the source files from now on, with a warning: a compaction is damaged."""
        self.compacted = False
        log.warning(
            "%s: reading the source files instead, which takes longer; `arealflow compact %s` merges them again",
            str(damage).split(". Restore")[0],
            self.run.name,
        )

    def rows(self, name: str, regions: Sequence[Region] | None = None) -> pa.Table:
        """The rows of a view of `DERIVED`, of all or these regions: from compactions, or from commits and manifests."""
        parts = [DERIVED[name].empty_table()]
        for region in self.regions if regions is None else regions:
            merged = self.merged(region, name)
            parts += [pa.Table.from_pylist(_DERIVE[name](region), DERIVED[name])] if merged is None else merged
        return pa.concat_tables(parts)


def shard_refs(rows: pa.Table) -> list[tuple[int, ShardRef]]:
    """The shards in rows of the view `shards`, with their iterations."""
    found = rows.select(["iteration", *ShardRef.model_fields]).to_pylist()
    return [(row.pop("iteration"), ShardRef(**row)) for row in found]


def compact_schema(table: str) -> pa.Schema:
    """The columns of a table in a compaction: with the iteration, and null where an older table lacked a column."""
    if table in DERIVED:
        return DERIVED[table]
    fields = [pa.field(f.name, f.type) for f in TABLES[table] if f.name != "iteration"]
    return pa.schema([pa.field("iteration", pa.int32()), *fields])


def _shard_rows(found: Selected) -> Iterator[dict[str, Any]]:
    for table in found.manifest.tables.values():
        for shard in table.shards:
            yield shard.model_dump() | {
                "iteration": found.manifest.iteration,
                "stage": found.manifest.stage,
                "table_name": table.name,
                "manifest": found.path,
            }


def _stage_row(found: Selected) -> dict[str, Any]:
    manifest, tables = found.manifest, found.manifest.tables.values()
    return provenance_row(manifest.provenance) | {
        **manifest.model_dump(include={"iteration", "stage", "key", "attempt", "run"}),
        "tables": list(manifest.tables),
        "shards": sum(len(table.shards) for table in tables),
        "rows": sum(table.rows for table in tables),
        "tokens": sum(table.tokens for table in tables),
        "bytes": sum(shard.bytes for table in tables for shard in table.shards),
        "reused": (manifest.run, manifest.provenance.owner) != (found.commit.run, found.commit.provenance.owner),
        "metrics": list(manifest.metrics.items()),
        "path": found.path,
    }


def _commit_row(commit: IterationCommit) -> dict[str, Any]:
    return provenance_row(commit.provenance) | {
        **commit.model_dump(include={"iteration", "attempt", "run", "segment", "previous"}),
        "version": commit.weights.version,
        "weights": commit.weights.path,
        "checkpoint_version": commit.checkpoint.version if commit.checkpoint else None,
        "stages": [ref.stage for ref in commit.stages],
        "state": json.dumps(commit.state),
    }


def provenance_row(made: Provenance) -> dict[str, Any]:
    """The columns of a record's provenance, in all views; a view takes those of its schema."""
    started, committed = utc(made.started), utc(made.committed)
    times = {"started": started, "committed": committed, "seconds": (committed - started).total_seconds()}
    return made.model_dump() | times


_DERIVE: Final[dict[str, Callable[[Region], list[dict[str, Any]]]]] = {
    "commits": lambda region: [_commit_row(commit) for commit in region.commits],
    "stages": lambda region: [_stage_row(found) for found in region.selected()],
    "shards": lambda region: [row for found in region.selected() for row in _shard_rows(found)],
}


# ── which parts of a history are compacted ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CompactionName:
    """A compaction as the name of its record describes it."""

    path: str
    first: int
    stop: int
    generation: int


def list_compactions(store: Store, run: str) -> list[CompactionName]:
    """The compactions in the run's folder. If the listing lacks some, queries only take longer."""
    matches = (_COMPACTION.fullmatch(name) for name in store.children(paths.compactions(run)))
    return [CompactionName(f"{paths.compactions(run)}/{m[0]}", int(m[1]), int(m[2]), int(m[3])) for m in matches if m]


def valid_compactions(run: Run) -> list[Compaction]:
    """The largest valid compactions of the run's history, in order and without overlap.

    A parent's compactions count if they end no later than where the derived run begins.
    """
    found, covered = list[Compaction](), 0
    for candidate in _candidates(run):
        if candidate.first >= covered and (record := _valid(run, candidate)) is not None:
            found.append(record)
            covered = record.stop
    return found


def _candidates(run: Run) -> list[CompactionName]:
    """Compactions of this run and its parents, by first iteration, the longest first, then the newest."""
    own = list_compactions(run.store, run.name)
    inherited = [c for c in _candidates(run.parent) if c.stop <= run.first] if run.parent else []
    return sorted([*own, *inherited], key=lambda c: (c.first, -c.stop, c not in own, -c.generation))


def _valid(run: Run, name: CompactionName) -> Compaction | None:
    """The record, if its seal holds and its last commit is this run's; else None."""
    try:
        record = read_record(run.store, name.path, Compaction)
        last = bytes_digest(run.store, run.commit_path(record.stop - 1))
    except StoreError:  # damaged, of a newer schema, or removed since
        return None
    return record if (record.first, record.stop, record.last) == (name.first, name.stop, last) else None
