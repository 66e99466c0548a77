"""`arealflow weights RUN`: list, export, compare, tag and protect the versions of a run's weights."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.history.journal import append
from areal_tasks.store.objects.files import materialise, read_weights
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.weights import (
    WeightsVersion,
    compare_folders,
    export_weights,
    find_weights,
    list_weights,
    protect_weights,
    tag_weights,
)
from flows.cli.audit import RunName
from flows.cli.inspect import AsJson, StoreUrl, show
from schemas.errors import UserError

_WORDS = {"list": 0, "export": 2, "compare": 2, "tag": 2, "protect": 1}
_USAGE = "list · export VERSION FOLDER · compare VERSION VERSION · tag VERSION NAME · protect VERSION"


def weights(
    run: RunName,
    what: Annotated[str, typer.Argument(help=f"{_USAGE}. A VERSION is a number, a tag, or `newest`.")] = "list",
    words: Annotated[list[str] | None, typer.Argument(help="Arguments of that action.")] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """The versions of a run's weights: list, export as a Hugging Face folder, compare, tag, protect from gc."""
    given = words or []
    if what not in _WORDS or len(given) != _WORDS[what]:
        raise UserError(f"arealflow weights {run}: {' '.join([what, *given])!r} should be one of: {_USAGE}")
    place = open_store(store)
    there = load_run(place, run)
    if what == "list":
        show([_row(version, as_json) for version in list_weights(there)], as_json, f"weights of {run}")
    elif what == "export":
        _export(there, given[0], Path(given[1]))
    elif what == "compare":
        show(_compared(there, *given), as_json, f"{run}: version {given[0]} and version {given[1]}")
    elif what == "tag":
        made = tag_weights(place, run, given[1], find_weights(there, given[0]))
        typer.echo(f"version {made.version} of {run} is {made.tag!r}, and safe from gc")
    else:
        kept = protect_weights(place, run, find_weights(there, given[0]))
        typer.echo(f"version {kept.version} of {run} is safe from gc")


def _row(version: WeightsVersion, as_json: bool) -> dict[str, object]:
    if as_json:
        return asdict(version)
    return {
        "version": version.version,
        "state": version.state,
        "bytes": f"{version.bytes:,}",
        "committed": version.committed[:19],
        "tags": ", ".join(version.tags) or "-",
        "protected": "yes" if version.protected else "-",
        "attempt": version.attempt or "-",
    }


def _export(run: Run, name: str, into: Path) -> None:
    ref = find_weights(run, name)
    size = export_weights(run.store, ref, into)
    append(run.store, run.name, "exported", {"version": ref.version, "weights_attempt": ref.attempt, "bytes": size})
    typer.echo(f"version {ref.version} of {run.name}: {size:,} bytes in {into}")


def _compared(run: Run, left: str, right: str) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="arealflow-weights-") as scratch:
        folders = [_local(run.store, run, name, Path(scratch) / str(i)) for i, name in enumerate((left, right))]
        return [asdict(difference) for difference in compare_folders(*folders)]


def _local(store: Store, run: Run, name: str, into: Path) -> Path:
    into.mkdir()
    return materialise(store, read_weights(store, find_weights(run, name)).files, into)
