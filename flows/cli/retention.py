"""`arealflow weights`, `gc` and `compact`: what a store keeps, and what is removed or merged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.catalog import DERIVED, Catalog
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.files import materialise, read_weights
from areal_tasks.store.retention.compact import compact_all
from areal_tasks.store.retention.gc import Removal, RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import interrupted_removals, plan_run_removal, remove_planned, remove_run
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
from flows.cli.output import AsJson, RunName, StoreUrl, echo, show
from schemas.compaction import SCALAR_TABLES
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
    loaded = load_run(place, run)
    if what == "list":
        show([_version_row(version, as_json) for version in list_weights(loaded)], as_json, f"weights of {run}")
    elif what == "export":
        ref, into = find_weights(loaded, given[0]), Path(given[1])
        size = export_weights(place, ref, into)
        append_log(place, run, "exported", {"version": ref.version, "weights_attempt": ref.attempt, "bytes": size})
        echo(f"version {ref.version} of {run}: {size:,} bytes in {into}")
    elif what == "compare":
        show(_compared(loaded, *given), as_json, f"{run}: version {given[0]} and version {given[1]}")
    elif what == "tag":
        made = tag_weights(place, run, given[1], find_weights(loaded, given[0]))
        echo(f"version {made.version} of {run} is {made.tag!r}, and safe from gc")
    else:
        kept = protect_weights(place, run, find_weights(loaded, given[0]))
        echo(f"version {kept.version} of {run} is safe from gc")


def _version_row(version: WeightsVersion, as_json: bool) -> dict[str, object]:
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


def _compared(run: Run, left: str, right: str) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="arealflow-weights-") as scratch:
        folders = []
        for name, into in ((left, Path(scratch) / "left"), (right, Path(scratch) / "right")):
            into.mkdir()
            folders.append(materialise(run.store, read_weights(run.store, find_weights(run, name)).files, into))
        return [asdict(difference) for difference in compare_folders(*folders)]


def gc(
    run: Annotated[str, typer.Option("--run", help="Only this run.")] = "",
    whole: Annotated[bool, typer.Option("--remove", help="Remove the whole run that --run names.")] = False,
    keep_weights: Annotated[
        int | None, typer.Option(help="Newest versions of each run's weights to keep. Default: all.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None, typer.Option(help="Newest checkpoints of each run to keep. Default: all.")
    ] = None,
    older_than: Annotated[
        float,
        typer.Option(
            min=0, help="Remove nothing newer than this many hours, except a whole run that has ended (--remove)."
        ),
    ] = 24.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only list what would be removed.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove what crashes left behind, and old versions by the rules given.

    Keeps everything that a run in progress, a fork, a replay, another run's initial weights, a tag or a restart needs.
    """
    place, rule = open_store(store), RetentionRule(keep_weights, keep_checkpoints, older_than * 3600)
    if whole and not run:
        raise UserError("--remove removes a whole run: name it with --run NAME")
    items = [plan_run_removal(place, run, rule.older_than)] if whole else _plan_items(place, rule, run)
    done = _remove_items(place, items, rule) if yes else []
    if as_json:
        rows = [asdict(item) | {"files": len(item.files), "removed": item in done} for item in items]
        show(rows, True)
    else:
        _print_items(items, done, yes)
        if older_than and not whole:
            echo(f"(files written in the last {older_than:g} hours are kept: --older-than)")


def _plan_items(store: Store, rule: RetentionRule, run: str) -> list[Removal]:
    names = [name for name in interrupted_removals(store) if run in ("", name)]
    partial = [plan_run_removal(store, name, rule.older_than) for name in names]
    if run in names:
        return partial
    return [*partial, *plan_removals(store, rule, *([run] if run else []))]


def _remove_items(store: Store, items: Sequence[Removal], rule: RetentionRule) -> list[Removal]:
    runs = [item for item in items if item.kind == "run"]
    for item in runs:
        remove_run(store, item, rule.older_than)
    return [*runs, *remove_planned(store, [item for item in items if item.kind != "run"], rule)]


def _print_items(items: Sequence[Removal], done: Sequence[Removal], yes: bool) -> None:
    for item in items:
        left = "" if not yes or item in done else " (kept: it is in use now)"
        echo(f"{item.path}: {item.kind}, {len(item.files)} files, {item.bytes:,} bytes: {item.why}{left}")
    shown = done if yes else items
    total = f"{sum(len(item.files) for item in shown)} files, {sum(item.bytes for item in shown):,} bytes"
    if yes:
        echo(f"removed {total}")
    else:
        echo(f"would remove {total}" + (": --yes does it" if items else ""))


def compact(
    run: RunName,
    everything: Annotated[
        bool, typer.Option("--all", help="Every table, texts and tokens too: as large as the run's tables are.")
    ] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Merge a run's tables of scalars, commits and manifests into few files. Runs also do this themselves."""
    started, opened = time.monotonic(), load_run(open_store(store), run)
    tables = tuple(Catalog(opened).stages_of) if everything else SCALAR_TABLES
    made = compact_all(opened, tables)
    rows = [
        {
            "table": name,
            "rows": sum(file.rows for file in table.files),
            "files": len(table.files),
            "bytes": sum(file.bytes for file in table.files),
        }
        for name, table in made.tables.items()
        if name not in DERIVED or table.files
    ]
    seconds = time.monotonic() - started
    show(rows, as_json, f"run {run}: iterations {made.first}–{made.stop - 1} compacted in {seconds:.1f} s")
