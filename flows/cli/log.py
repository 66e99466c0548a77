"""`arealflow log`: who ran, cancelled, changed, forked, replayed and removed what in a run, and when."""

from __future__ import annotations

import json

import typer

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.opening import check_name
from areal_tasks.store.runs import load_run
from flows.cli.audit import RunName
from flows.cli.inspect import AsJson, StoreUrl, show
from schemas.manifest import LogRecord


def log(run: RunName, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """The log of a run, also of a removed one, oldest line first."""
    place = open_store(store)
    lines = read_log(place, _known(place, run))
    if as_json:
        typer.echo(json.dumps([line.model_dump() for line in lines], indent=1))
    else:
        show([_row(line) for line in lines], False)


def _known(store: Store, run: str) -> str:
    """`run`, if a run of this name exists or was removed; else UserError with the names of the runs."""
    check_name(run)
    return run if store.exists(paths.run_tombstone(run)) else load_run(store, run).name


def _row(line: LogRecord) -> dict[str, object]:
    return {
        "n": line.n,
        "time": line.time[:19],
        "action": line.action,
        "who": f"{line.user}@{line.host}",
        "flow run": line.prefect_flow_run_id or "-",
        "details": ", ".join(f"{name} {_short(value)}" for name, value in line.details.items()),
    }


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
