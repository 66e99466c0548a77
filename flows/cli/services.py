"""`arealflow logs` and `top`: what the services of a run have written and what they do now, from any machine."""

from __future__ import annotations

import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import filesize
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.commit import last_owner
from areal_tasks.store.history.journal import end_of_start
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.service_logs import LogName, ServiceLog, service_logs
from areal_tasks.store.system import newest_record, read_samples, watch
from flows.cli.output import AsJson, RunName, StoreUrl, echo, show, table_of, uncoloured, visible
from flows.home import logs_folder
from schemas.errors import UserError

Row = dict[str, Any]

POLL_SECONDS: Final = 2.0


def logs(
    run: RunName,
    service: Annotated[str, typer.Argument(help="Name of a service, such as trainer; none: a list of the logs.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what is added, until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Only the last N lines; 0: all.")] = 0,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """The log of a service's newest start, or a list of the logs of all services of a run."""
    place, folder = open_store(store), logs_folder()
    name = load_run(place, run).name
    found = service_logs(place, name, folder)
    if not service:
        show([_log_row(log) for log in found], as_json, f"logs of services · run {name}")
        if not found:
            echo("(services that are threads log in the flow's log)", err=True)
        return
    if not (mine := _logs_of(found, service)):
        names = ", ".join(dict.fromkeys(log.name.service for log in found))
        others = f"there are logs of {names}" if names else "no service of it has one (threads log in the flow's log)"
        missing = f"run {name!r} has no log of a service {service!r} yet: {others}"
        if not follow:
            raise UserError(missing)
        with suppress(KeyboardInterrupt):
            echo(f"{missing}; waiting for one", err=True)
            while not mine:
                time.sleep(POLL_SECONDS)
                mine = _logs_of(service_logs(place, name, folder), service)
    if not mine:
        return
    newest = mine[-1]
    at = newest.tail(tail) if tail else 0
    _write_log(newest, at)
    if follow:
        _follow(place, name, folder, newest.name, newest.size)


def _follow(store: Store, run: str, folder: Path, name: LogName, at: int) -> None:
    """Write what is added to a service's log, and the logs of its later starts."""
    try:
        while True:
            time.sleep(POLL_SECONDS)
            for log in service_logs(store, run, folder):
                if log.name.service != name.service or log.name < name:
                    continue
                if log.name > name:
                    name, at = log.name, 0
                    again = f"owner {name.owner}, restart {name.restart}"
                    echo(f"── {name.service} starts again: {again}", err=True)
                _write_log(log, at)
                at = max(at, log.size)
    except KeyboardInterrupt:
        return


def _logs_of(found: Sequence[ServiceLog], service: str) -> list[ServiceLog]:
    return [log for log in found if log.name.service == service]


def _write_log(log: ServiceLog, at: int) -> None:
    decoder = getincrementaldecoder("utf-8")("backslashreplace")
    for data in log.read_from(at):
        echo(uncoloured(decoder.decode(data)), end="")


def _log_row(log: ServiceLog) -> dict[str, Any]:
    return {
        "service": log.name.service,
        "owner": log.name.owner,
        "restart": log.name.restart,
        "bytes": log.size,
        "where": str(log.file) if log.file else "store",
    }


#: Between two records that say that the samples are watched: the flow acts on each for longer.
WATCH_SECONDS: Final = 45.0
#: How long a single table waits for a sample that is newer than the stored ones.
FRESH_SECONDS: Final = 15.0


class Watcher:
    """Reads the newest samples of a run, and asks its flow to store them at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.owner = 0
        self._record = 0
        self._asked = 0.0
        self.rows: list[Row] = []

    def ended(self) -> str:
        """How and when the last start of the flow ended, as far as the run's log says; else empty."""
        end = end_of_start(self.run.store, self.run.name, self.owner)
        return f"{end.action} at {end.time[:19]} UTC" if end else ""

    def refresh(self) -> bool:
        """Read the newest sample; whether there is a new one."""
        if (owner := last_owner(self.run.store, self.run.name)) != self.owner:
            self.owner, self._record, self._asked = owner, 0, 0.0
        newest = newest_record(self.run, self.owner, self._record) if self.owner else 0
        if newest == self._record:
            return False
        self._record, samples = newest, read_samples(self.run, self.owner, newest).to_pylist(maps_as_pydicts="strict")
        last = max(row["time"] for row in samples)
        self.rows = sorted((row for row in samples if row["time"] == last), key=_order)
        return True

    def ask(self) -> None:
        """Ask the flow to store its samples at once, unless it was asked a short time ago."""
        now = time.monotonic()
        if self.owner and now - self._asked > WATCH_SECONDS:
            with suppress(StoreError):  # no permission to write: the samples come less often
                watch(self.run.store, self.run.name, self.owner)
            self._asked = now


def top(
    run: RunName,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit, as outside a terminal.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """What each service of a run does or waits for, its queue, and its use of the machine; until Ctrl-C."""
    watcher = Watcher(load_run(open_store(store), run))
    watcher.refresh()
    ended = watcher.ended()
    if not ended:
        watcher.ask()
    if ended or once or as_json or not sys.stdout.isatty():
        _print_sample(watcher, ended, as_json)
    else:
        with suppress(KeyboardInterrupt):
            _live(watcher)


def _print_sample(watcher: Watcher, ended: str, as_json: bool) -> None:
    """Print the newest sample; of a run in progress, one that is taken now if it comes soon."""
    until = time.monotonic() + FRESH_SECONDS
    while not ended and time.monotonic() < until and not watcher.refresh():
        time.sleep(POLL_SECONDS / 4)
    if not watcher.rows:
        name = watcher.run.name
        raise UserError(f"there are no samples of the services of run {name!r} yet: only a running flow takes them")
    rows = watcher.rows if as_json else [row_of(row) for row in watcher.rows]
    show(rows, as_json, title_of(watcher.run.name, watcher.rows[0], ended))


def _live(watcher: Watcher) -> None:
    """Show the newest sample until the flow's end."""
    since = time.monotonic()
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            if not (ended := watcher.ended()):
                watcher.ask()
            if watcher.refresh():
                since = time.monotonic()
            silent = time.monotonic() - since
            note = ended or (f"no new sample for {silent:.0f} s" if silent > FRESH_SECONDS else "")
            title = title_of(watcher.run.name, watcher.rows[0] if watcher.rows else {}, note)
            live.update(Group(Text(visible(title)), table_of([row_of(row) for row in watcher.rows])), refresh=True)
            if ended:
                return
            time.sleep(POLL_SECONDS)


def title_of(run: str, row: Mapping[str, Any], note: str) -> str:
    """`run r · start 1 · sampled 10:04:31 UTC · finished at …`."""
    sampled = f"start {row['owner']} · sampled {row['time']:%H:%M:%S} UTC" if row else "waiting for the first sample"
    return " · ".join(part for part in (f"run {run}", sampled, note) if part)


def row_of(row: Mapping[str, Any]) -> dict[str, str]:
    """A sample as a row of the table."""
    at_once = f" of {row['at_once']}" if row["at_once"] is not None else ""
    return {
        "service": row["service"],
        "machine": row["host"] or "",
        "busy": _percent(row["busy"]),
        "now": row["doing"] or f"waits for {row['waits_for']}",
        "for": f"{row['state_seconds']:.0f} s",
        "CPU": _percent(row["cpu"]),
        "memory": _size(row["memory"]),
        "GPU": " ".join(filter(None, (_percent(row["gpu"]), _size(row["gpu_memory"])))),
        "running": "" if row["running"] is None else f"{row['running']}{at_once}",
        "waiting": "" if row["waiting"] is None else str(row["waiting"]),
    }


def _order(row: Row) -> tuple[bool, str, int, int]:
    """The flow first, then by the service's kind and its numbers: `inference-2.1` is before `inference-10`."""
    kind, _, numbers = row["service"].rpartition("-")
    number, _, node = numbers.partition(".")
    known = number.isdigit() and (node or "0").isdigit()
    return row["service"] != "flow", *((kind, int(number), int(node or 0)) if known else (row["service"], 0, 0))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("%", " %")


def _size(number: int | None) -> str:
    return "" if number is None else filesize.decimal(number)
