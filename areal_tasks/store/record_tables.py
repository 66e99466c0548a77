"""The rows of the views `log` and `segments`, which are read from records and not from tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from areal_tasks.store.journal import read_log
from areal_tasks.store.runs import Run
from schemas.manifest import LogRecord, Segment
from schemas.recipe.recorded import read_recorded
from schemas.views import LOG, SEGMENTS


def log_table(run: Run) -> pa.Table:
    """The rows of the view `log`: of this run, not of its parents."""
    return pa.Table.from_pylist([_log_row(line) for line in read_log(run.store, run.name)], schema=LOG)


def segments_table(run: Run) -> pa.Table:
    """The rows of the view `segments`: the recipes of this run and of those that it shares its history with."""
    family = [run]
    while (parent := family[-1].parent) is not None:
        family.append(parent)
    rows = [_segment_row(member.name, segment) for member in reversed(family) for segment in member.segments]
    return pa.Table.from_pylist(rows, schema=SEGMENTS)


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
        "host": made.host,
        "owner": made.owner,
        "code_version": made.code_version,
        "committed": utc(made.committed),
    }


def utc(text: str) -> datetime:
    """A time of a record, as the views have it: in UTC, without saying so."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
