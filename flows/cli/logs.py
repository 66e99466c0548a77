"""`arealflow logs`: what the services of a run have written, while the run goes on and after it, on any machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.runs import load_run
from areal_tasks.store.service_logs import LogName, ServiceLog, service_logs
from flows.cli.audit import RunName
from flows.cli.inspect import AsJson, StoreUrl, show
from flows.home import logs_folder
from schemas.errors import UserError

FOLLOW_SECONDS: Final = 2.0


def logs(
    run: RunName,
    service: Annotated[str, typer.Argument(help="Name of a service, such as trainer; none: a list of the logs.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Only the last N lines; 0: all.")] = 0,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """The log of a service's newest start, or a list of the logs of all services of a run."""
    place, folder = open_store(store), logs_folder()
    name = load_run(place, run).name
    found = service_logs(place, name, folder)
    if not service:
        show([_row(log) for log in found], as_json, f"logs of services · run {name}")
        return
    mine = _of(found, service)
    if not mine and not follow:
        raise UserError(_none_of(found, service, name))
    if not mine:
        typer.echo(f"{_none_of(found, service, name)}; waiting for one", err=True)
    while not mine:
        time.sleep(FOLLOW_SECONDS)
        mine = _of(service_logs(place, name, folder), service)
    newest = mine[-1]
    at = newest.tail(tail) if tail else 0
    _write(newest, at)
    if follow:
        _follow(place, name, folder, newest.name, newest.size)


def _follow(store: Store, run: str, folder: Path, name: LogName, at: int) -> None:
    """Write what is added to a service's log, and the logs of its later starts."""
    try:
        while True:
            time.sleep(FOLLOW_SECONDS)
            for log in service_logs(store, run, folder):
                if log.name.service == name.service and log.name >= name:
                    at = at if log.name == name else _begin(log.name)
                    _write(log, at)
                    name, at = log.name, max(at, log.size)
    except KeyboardInterrupt:
        return


def _begin(name: LogName) -> int:
    typer.echo(f"── {name.service} starts again: owner {name.owner}, restart {name.restart}", err=True)
    return 0


def _of(found: Sequence[ServiceLog], service: str) -> list[ServiceLog]:
    return [log for log in found if log.name.service == service]


def _none_of(found: Sequence[ServiceLog], service: str, run: str) -> str:
    """That a service has no log, with the names of the services that have one."""
    names = ", ".join(dict.fromkeys(log.name.service for log in found))
    others = f"there are logs of {names}" if names else "no service of it has one (threads log in the flow's log)"
    return f"run {run!r} has no log of a service {service!r} yet: {others}"


def _write(log: ServiceLog, at: int) -> None:
    for data in log.read_from(at):
        sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _row(log: ServiceLog) -> dict[str, Any]:
    return {
        "service": log.name.service,
        "owner": log.name.owner,
        "restart": log.name.restart,
        "bytes": log.size,
        "where": str(log.file) if log.file else "store",
    }
