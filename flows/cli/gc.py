"""`arealflow gc`: removes what no run needs. Without --yes it only lists what it would remove."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.retention.gc import Item, Rule, plan
from areal_tasks.store.retention.gc_remove import execute, interrupted, remove_run, whole_run
from flows.cli.inspect import AsJson, StoreUrl
from schemas.errors import UserError


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

    Keeps everything that a running run, a fork, a replay, another run's initial weights, a tag or a restart needs.
    """
    place, rule = open_store(store), Rule(keep_weights, keep_checkpoints, older_than * 3600)
    if whole and not run:
        raise UserError("--remove removes a whole run: name it with --run NAME")
    items = [whole_run(place, run, rule.older_than)] if whole else _found(place, rule, run)
    done = _remove(place, items, rule) if yes else []
    if as_json:
        typer.echo(json.dumps([_row(item, yes and item in done) for item in items], indent=1))
    else:
        _print(items, done, yes)
        if older_than and not whole:
            typer.echo(f"(files written in the last {older_than:g} hours are kept: --older-than)")


def _found(store: Store, rule: Rule, run: str) -> list[Item]:
    partial = [whole_run(store, name, rule.older_than) for name in interrupted(store) if run in ("", name)]
    return [*partial, *(plan(store, rule, run) if run not in {item.run for item in partial} else [])]


def _remove(store: Store, items: Sequence[Item], rule: Rule) -> list[Item]:
    for item in items:
        if item.kind == "run":
            remove_run(store, item, rule.older_than)
    runs = [item for item in items if item.kind == "run"]
    return [*runs, *execute(store, [item for item in items if item.kind != "run"])]


def _row(item: Item, removed: bool) -> dict[str, Any]:
    return {
        "run": item.run,
        "kind": item.kind,
        "path": item.path,
        "version": item.version.version if item.version else None,
        "files": len(item.files),
        "bytes": item.bytes,
        "why": item.why,
        "removed": removed,
    }


def _print(items: Sequence[Item], done: Sequence[Item], yes: bool) -> None:
    for item in items:
        left = "" if not yes or item in done else " (kept: it is in use now)"
        typer.echo(f"{item.path}: {item.kind}, {len(item.files)} files, {item.bytes:,} bytes: {item.why}{left}")
    shown = done if yes else items
    total = f"{sum(len(item.files) for item in shown)} files, {sum(item.bytes for item in shown):,} bytes"
    if yes:
        typer.echo(f"removed {total}")
    else:
        typer.echo(f"would remove {total}" + (": --yes does it" if items else ""))
