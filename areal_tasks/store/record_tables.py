"""The rows of the views `log`, `segments`, `starts` and `spool`, which are read from records and not from tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.rollout.made_with import made_with
from areal_tasks.rollout.settled import settled_after
from areal_tasks.store import paths
from areal_tasks.store.catalog import Catalog, provenance_row
from areal_tasks.store.changes import describe
from areal_tasks.store.commit import check_owners, last_owner, missing_before, read_record
from areal_tasks.store.history.journal import code_of_last_start, end_of_start, read_log
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import now, utc
from areal_tasks.store.runs import Run
from areal_tasks.store.spool import read_spool
from areal_tasks.store.waits import may_run
from schemas.errors import UserError
from schemas.manifest import (
    ENDINGS,
    IterationCommit,
    LogRecord,
    OwnerRecord,
    RejectedGroup,
    Segment,
    SpooledGroup,
    SpoolRecord,
)
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.recorded import read_recorded
from schemas.views import LOG, SEGMENTS, SPOOL, STARTS

#: Why a group that waits in the spool is not used.
OTHER_SETTINGS: Final = "made with other settings: it begins again"


def log_table(run: Run) -> pa.Table:
    """The rows of the view `log`: of this run, not of its parents."""
    head, lines = run.head(), read_log(run.store, run.name)
    if head is not None and head.run == run.name and head.log_records > len(lines):
        raise missing_before(run.store.uri(paths.log(run.name, head.log_records)))
    return pa.Table.from_pylist([_log_row(line) for line in lines], schema=LOG)


def segments_table(run: Run) -> pa.Table:
    """The rows of the view `segments`: the recipes of this run and of its ancestors."""
    family = [run]
    while (parent := family[-1].parent) is not None:
        family.append(parent)
    for member in family:
        member.checked_committed()  # whose last commit names a segment
    rows = [_segment_row(member.name, segment) for member in reversed(family) for segment in member.segments]
    return pa.Table.from_pylist(rows, schema=SEGMENTS)


def spool_table(run: Run) -> pa.Table:
    """The rows of the view `spool`: of this run, not of its parents, whose groups a derived run does not use."""
    records = read_spool(run.store, run.name)
    rows = _spool_rows(records)
    head = run.head() if rows else None
    settled, version, digest = settled_after(head), head.weights.version if head else 0, _made_with(run, head)
    others = {record.start for record in records if record.kind == "opened" and digest not in ("", record.made_with)}
    used = _spool_rows(record for record in records if record.start not in others)
    rows |= {group: row for group, row in used.items() if group not in settled}
    complete = (
        row | _group_state(row, row["group_id"] in settled, version, row["start"] in others)
        for _, row in sorted(rows.items())
    )
    return pa.Table.from_pylist(list(complete), schema=SPOOL)


def _spool_rows(records: Iterable[SpoolRecord]) -> dict[int, dict[str, Any]]:
    """The groups of these records, each by its last record."""
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        place = {"start": record.start, "record": record.n, "written": utc(record.provenance.committed)}
        groups: list[SpooledGroup | RejectedGroup] = [*record.finished, *record.rejected]
        rows |= {g.index: {"group_id": g.index} | g.model_dump(exclude={"index"}) | place for g in groups}
    return rows


def _made_with(run: Run, head: IterationCommit | None) -> str:
    """`SpoolRecord.made_with` of the groups that the run makes after `head`; empty if that is unknown."""
    prompts = next((ref for ref in head.stages if ref.stage == "prompts"), None) if head else None
    if head is None or prompts is None:
        return ""
    try:
        recipe = parse_recipe(run.recipe_at(head.iteration + 1), run.name)
    except UserError:  # a later version's
        return ""
    assert isinstance(recipe, RlhfRecipe), "others have no spool"
    code = code_of_last_start(run.store, run.name)
    return made_with(recipe, run.read_stage(prompts).tables["prompts"].digest, code)


def _group_state(row: dict[str, Any], settled: bool, version: int, other: bool) -> dict[str, Any]:
    """The state of a group; `version`: of the newest committed weights; `other`: it was made with other settings."""
    if other and not settled:
        return {"state": "dropped", "reason": OTHER_SETTINGS}
    if "reason" in row or settled:
        return {"state": "rejected" if "reason" in row else "consumed"}
    waited = utc(now()) - row["written"]
    return {"state": "waiting", "lag": version - row["version"], "waiting_seconds": waited.total_seconds()}


def _log_row(line: LogRecord) -> dict[str, Any]:
    details = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in line.details.items()]
    return line.model_dump() | {"time": utc(line.time), "details": details}


def _segment_row(run: str, segment: Segment) -> dict[str, Any]:
    return provenance_row(segment.provenance) | {
        "run": run,
        "segment": segment.n,
        "from_iteration": segment.from_iteration,
        "recipe": json.dumps(read_recorded(segment.recipe)),
        "change": describe(segment.change) if segment.change else None,
    }


# ── starts of the flow ────────────────────────────────────────────────────────────────────────────────────────────────


def read_owners(run: Run) -> list[OwnerRecord]:
    """The records of all starts of the flow, in order."""
    numbers = range(1, last_owner(run.store, run.name) + 1)
    return parallel(lambda n: read_record(run.store, paths.owner(run.name, n), OwnerRecord), numbers)


def running_start(run: Run) -> OwnerRecord | None:
    """The last start of the flow, if it may run: the log has no end of it, and its process, if here, runs."""
    owner = last_owner(run.store, run.name)
    if not owner or end_of_start(run.store, run.name, owner) is not None:
        return None
    record = read_record(run.store, paths.owner(run.name, owner), OwnerRecord)
    return record if may_run(record) else None


def starts_table(catalog: Catalog) -> pa.Table:
    """The rows of the view `starts`: of this run, not of its parents."""
    run = catalog.run
    commits, asked = _last_commits(catalog), 0
    if run.segments and run.record.kind != "replay":  # which may have no engines
        asked = requested_gpus(read_recorded(run.segments[-1].recipe))
    lines: dict[Any, dict[str, LogRecord]] = {}
    for line in read_log(run.store, run.name):
        lines.setdefault(line.details.get("owner"), {})[line.action] = line
    owners = read_owners(run)
    check_owners(run.store, run.name, len(owners), commits)
    rows = [_row(owner, lines.get(owner.n, {}), commits.get(owner.n), asked) for owner in owners]
    return pa.Table.from_pylist(rows, schema=STARTS)


def _last_commits(catalog: Catalog) -> dict[int, datetime]:
    """When each start of the run last committed a stage or an iteration, for those that committed any."""
    tables = [t.select(["run", "owner", "committed"]) for t in map(catalog.rows, ("stages", "commits"))]
    own = pa.concat_tables(tables).filter(pc.field("run") == catalog.run.name)
    last = own.group_by("owner").aggregate([("committed", "max")])
    return dict(zip(last["owner"].to_pylist(), last["committed_max"].to_pylist(), strict=True))


def _row(owner: OwnerRecord, lines: Mapping[str, LogRecord], committed: datetime | None, asked: int) -> dict[str, Any]:
    """`lines` are those of the start in the log, by their action."""
    end = next((line for action, line in lines.items() if action in ENDINGS), None)
    started, ended = utc(owner.started), utc(end.time) if end else committed
    placed = lines.get("placed")
    return owner.model_dump(include={"host", "pid", "prefect_flow_run_id"}) | {
        "owner": owner.n,
        "started": started,
        "ended": ended,
        "ended_by": end.action if end else "last commit" if ended else None,
        "seconds": (ended - started).total_seconds() if ended else None,
        "gpus": len(placed_gpus(placed)) if placed else asked,
        "gpus_by": "log" if placed else "recipe",
    }


def placed_gpus(line: LogRecord) -> set[str]:
    """The GPUs that a line `placed` names, each once: services may share one."""
    services = (gpus for name, gpus in line.details.items() if name != "owner")
    return {gpu for gpus in services for gpu in str(gpus).split("+")}


def requested_gpus(recipe: Mapping[str, Any]) -> int:
    """How many GPUs a recipe asks for; its services share only those that it names for both. 0: it names none.

    For starts whose placement is not in the log: they had none, or an earlier version ran them.
    """
    trainer, inference = recipe.get("trainer", {}), recipe.get("inference", {})
    training, serving = set(trainer.get("gpus", ())), set(inference.get("gpus", ()))
    if inference.get("engine") != "sglang":
        return len(training)
    if training and serving:
        return len(training | serving)
    servers = inference.get("servers", 1) * inference.get("tensor_parallel", 1)
    return (len(training) or trainer.get("ranks", 0)) + (len(serving) or servers)
