"""The rows of the views `log`, `segments` and `spool`, which are read from records and not from tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from areal_tasks.rollout.settled import settled_after
from areal_tasks.store.changes import describe
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.provenance import now
from areal_tasks.store.runs import Run
from areal_tasks.store.spool import read_spool
from schemas.manifest import LogRecord, RejectedGroup, Segment, SpooledGroup
from schemas.recipe.recorded import read_recorded
from schemas.views import LOG, SEGMENTS, SPOOL


def log_table(run: Run) -> pa.Table:
    """The rows of the view `log`: of this run, not of its parents."""
    return pa.Table.from_pylist([_log_row(line) for line in read_log(run.store, run.name)], schema=LOG)


def segments_table(run: Run) -> pa.Table:
    """The rows of the view `segments`: the recipes of this run and of its ancestors."""
    family = [run]
    while (parent := family[-1].parent) is not None:
        family.append(parent)
    rows = [_segment_row(member.name, segment) for member in reversed(family) for segment in member.segments]
    return pa.Table.from_pylist(rows, schema=SEGMENTS)


def spool_table(run: Run) -> pa.Table:
    """The rows of the view `spool`: of this run, not of its parents, whose groups a child does not use."""
    rows: dict[int, dict[str, Any]] = {}
    for record in read_spool(run.store, run.name):
        place = {"start": record.start, "record": record.n, "written": utc(record.provenance.committed)}
        groups: list[SpooledGroup | RejectedGroup] = [*record.finished, *record.rejected]
        rows |= {group.index: _group_row(group) | place for group in groups}
    head = run.head() if rows else None
    settled, version = settled_after(head), head.weights.version if head else 0
    complete = (row | _standing(row, row["group_id"] in settled, version) for _, row in sorted(rows.items()))
    return pa.Table.from_pylist(list(complete), schema=SPOOL)


def _group_row(group: SpooledGroup | RejectedGroup) -> dict[str, Any]:
    return {"group_id": group.index} | group.model_dump(exclude={"index"})


def _standing(row: dict[str, Any], settled: bool, version: int) -> dict[str, Any]:
    """The state of a group; `version`: of the newest committed weights."""
    if "reason" in row or settled:
        return {"state": "rejected" if "reason" in row else "consumed"}
    waited = utc(now()) - row["written"]
    return {"state": "waiting", "lag": version - row["version"], "waiting_seconds": waited.total_seconds()}


def _log_row(line: LogRecord) -> dict[str, Any]:
    details = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in line.details.items()]
    return line.model_dump() | {"time": utc(line.time), "details": details}


def _segment_row(run: str, segment: Segment) -> dict[str, Any]:
    made = segment.provenance
    return {
        "run": run,
        "segment": segment.n,
        "from_iteration": segment.from_iteration,
        "recipe": json.dumps(read_recorded(segment.recipe)),
        "change": describe(segment.change) if segment.change else None,
        "host": made.host,
        "owner": made.owner,
        "code_version": made.code_version,
        "committed": utc(made.committed),
    }


def utc(text: str) -> datetime:
    """A record's time as the views have it: in UTC, without a time zone."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
