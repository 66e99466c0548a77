"""The rows of the view `starts`: how long each start of a run's flow took, and how many GPUs its services had.

A start that was killed leaves no line in the log: it lasted at least until its last commit.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.store import paths
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.commit import read_record
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.parallel import parallel
from areal_tasks.store.record_tables import utc
from areal_tasks.store.runs import Run
from areal_tasks.store.search import last_present
from areal_tasks.store.waits import is_running
from schemas.manifest import ENDINGS, LogRecord, OwnerRecord
from schemas.recipe.recorded import read_recorded
from schemas.views import STARTS


def read_owners(run: Run) -> list[OwnerRecord]:
    """The records of all starts of the flow, in order."""
    count = last_present(lambda n: run.store.exists(paths.owner(run.name, n)), 1)
    return parallel(lambda n: read_record(run.store, paths.owner(run.name, n), OwnerRecord), range(1, count + 1))


def goes_on(run: Run) -> bool:
    """Whether the last start of the flow may still be running: neither log nor machine say no."""
    owner = last_present(lambda n: run.store.exists(paths.owner(run.name, n)), 1)
    if not owner or any(
        line.action in ENDINGS and line.details.get("owner") == owner for line in read_log(run.store, run.name)
    ):
        return False
    record = read_record(run.store, paths.owner(run.name, owner), OwnerRecord)
    return record.host != socket.gethostname() or is_running(record.pid)


def starts_table(catalog: Catalog) -> pa.Table:
    """The rows of the view `starts`: of this run, not of its parents."""
    run = catalog.run
    commits, asked = last_commits(catalog), _asked(run)
    lines: dict[Any, dict[str, LogRecord]] = {}
    for line in read_log(run.store, run.name):
        lines.setdefault(line.details.get("owner"), {})[line.action] = line
    rows = [_row(owner, lines.get(owner.n, {}), commits.get(owner.n), asked) for owner in read_owners(run)]
    return pa.Table.from_pylist(rows, schema=STARTS)


def last_commits(catalog: Catalog) -> dict[int, datetime]:
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
    return {
        "owner": owner.n,
        "host": owner.host,
        "pid": owner.pid,
        "prefect_flow_run_id": owner.prefect_flow_run_id,
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


def _asked(run: Run) -> int:
    """The number of GPUs of a start whose placement is not in the log; 0 for a replay, which may have no engines."""
    known = run.segments and run.record.kind != "replay"
    return asked_gpus(read_recorded(run.segments[-1].recipe)) if known else 0


def asked_gpus(recipe: Mapping[str, Any]) -> int:
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
