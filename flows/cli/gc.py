"""`arealflow gc`: removes what no run needs. Shows what it would do unless told to do it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.gc import Item, Rule, plan
from areal_tasks.store.gc_remove import execute, interrupted, remove_run, whole_run
from flows.cli.inspect import AsJson, StoreUrl
from schemas.errors import UserError


def gc(
    run: Annotated[str, typer.Option("--run", help="Only this run.")] = "",
    whole: Annotated[bool, typer.Option("--remove", help="Remove the whole run that --run names.")] = False,
    keep_weights: Annotated[
        int | None, typer.Option(help="Of each run's weights, keep the newest so many versions. Default: all.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None, typer.Option(help="Of each run's checkpoints, keep the newest so many. Default: all.")
    ] = None,
    older_than: Annotated[
        float,
        typer.Option(
            min=0, help="Remove nothing written in the last so many hours; a whole run that has ended goes at any age."
        ),
    ] = 24.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else only show what would be done.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Remove what crashes have left behind, and old versions where a rule says so.

    Nothing goes that a run at work, a fork, a replay, another run's beginning, a tag or a restart needs.
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
            typer.echo(f"(nothing that was written in the last {older_than:g} hours goes: --older-than)")


def _found(store: Store, rule: Rule, run: str) -> list[Item]:
    halves = [whole_run(store, name, rule.older_than) for name in interrupted(store) if run in ("", name)]
    return [*halves, *(plan(store, rule, run) if run not in {item.run for item in halves} else [])]


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
        left = "" if not yes or item in done else " (stays: it has come into use)"
        typer.echo(f"{item.path}: {item.kind}, {len(item.files)} files, {item.bytes:,} bytes: {item.why}{left}")
    shown = done if yes else items
    total = f"{sum(len(item.files) for item in shown)} files, {sum(item.bytes for item in shown):,} bytes"
    if yes:
        typer.echo(f"removed {total}")
    else:
        typer.echo(f"would remove {total}" + (": --yes does it" if items else ""))
