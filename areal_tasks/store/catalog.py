"""What a run holds, as its commits say: the selected stage manifests, and nothing that no commit selects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import pyarrow as pa

from areal_tasks.store.commit import read_verified
from areal_tasks.store.parallel import parallel
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, Provenance, ShardRef, StageManifest, StageRef
from schemas.views import COMMITS, STAGES


@dataclass(frozen=True)
class Selected:
    """A stage manifest, its path, and the first commit that selects it."""

    path: str
    manifest: StageManifest
    commit: IterationCommit


@dataclass(frozen=True)
class Catalog:
    """A run's commits up to its head, and their stage manifests, read when asked for."""

    run: Run

    @cached_property
    def commits(self) -> list[IterationCommit]:
        """All commits in order, the parent's before the fork included."""
        head = self.run.head()
        return parallel(self.run.commit, range(head.iteration + 1)) if head else []

    @cached_property
    def refs(self) -> dict[str, tuple[StageRef, IterationCommit]]:
        """Path of every selected manifest, how the first commit that selects it names it, and that commit."""
        found: dict[str, tuple[StageRef, IterationCommit]] = {}
        for commit in self.commits:
            for ref in commit.stages:
                found.setdefault(ref.path, (ref, commit))
        return found

    @cached_property
    def stages_of(self) -> dict[str, set[str]]:
        """Table name -> the stages that write it: a stage always writes the same tables, so one manifest each tells."""
        one_each = {ref.stage: (path, ref) for path, (ref, _) in self.refs.items()}
        found: dict[str, set[str]] = {}
        for stage, manifest in zip(one_each, self._read([path for path, _ in one_each.values()]), strict=True):
            for table in manifest.tables:
                found.setdefault(table, set()).add(stage)
        return found

    def selected(self, stages: Set[str] | None = None) -> list[Selected]:
        """The selected manifests of these stages (of all), in the order of iterations."""
        wanted = [path for path, (ref, _) in self.refs.items() if stages is None or ref.stage in stages]
        manifests = self._read(wanted)
        return [Selected(path, m, self.refs[path][1]) for path, m in zip(wanted, manifests, strict=True)]

    def shards(self, table: str) -> Iterator[tuple[int, ShardRef]]:
        """The shards of a table with their iterations, in order."""
        for found in self.selected(self.stages_of[table]):
            if table in found.manifest.tables:
                yield from ((found.manifest.iteration, shard) for shard in found.manifest.tables[table].shards)

    def _read(self, wanted: list[str]) -> list[StageManifest]:
        store = self.run.store
        return parallel(lambda path: read_verified(store, path, self.refs[path][0].sha256, StageManifest), wanted)

    def stages_table(self) -> pa.Table:
        """The rows of the view `stages`."""
        return pa.Table.from_pylist([_stage_row(found) for found in self.selected()], schema=STAGES)

    def commits_table(self) -> pa.Table:
        """The rows of the view `commits`."""
        return pa.Table.from_pylist([_commit_row(commit) for commit in self.commits], schema=COMMITS)


def _stage_row(found: Selected) -> dict[str, Any]:
    manifest, tables = found.manifest, found.manifest.tables.values()
    return _provenance(manifest.provenance) | {
        "iteration": manifest.iteration,
        "stage": manifest.stage,
        "key": manifest.key,
        "attempt": manifest.attempt,
        "run": manifest.run,
        "tables": list(manifest.tables),
        "shards": sum(len(table.shards) for table in tables),
        "rows": sum(table.rows for table in tables),
        "tokens": sum(table.tokens for table in tables),
        "bytes": sum(shard.bytes for table in tables for shard in table.shards),
        "reused": (manifest.run, manifest.provenance.owner) != (found.commit.run, found.commit.provenance.owner),
        "metrics": list(manifest.metrics.items()),
        "prefect_task_run_id": manifest.provenance.prefect_task_run_id,
        "path": found.path,
    }


def _commit_row(commit: IterationCommit) -> dict[str, Any]:
    return _provenance(commit.provenance) | {
        "iteration": commit.iteration,
        "attempt": commit.attempt,
        "run": commit.run,
        "version": commit.weights.version,
        "weights": commit.weights.path,
        "checkpoint_version": commit.checkpoint.version if commit.checkpoint else None,
        "segment": commit.segment,
        "stages": [ref.stage for ref in commit.stages],
        "state": json.dumps(commit.state),
        "previous": commit.previous,
    }


def _provenance(made: Provenance) -> dict[str, Any]:
    started, committed = _utc(made.started), _utc(made.committed)
    return {
        "started": started,
        "committed": committed,
        "seconds": (committed - started).total_seconds(),
        "host": made.host,
        "owner": made.owner,
        "code_version": made.code_version,
        "prefect_flow_run_id": made.prefect_flow_run_id,
    }


def _utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
