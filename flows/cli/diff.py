"""`arealflow diff`: where two runs first differ, and how their curves compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from areal_tasks.store.backend import open_store
from areal_tasks.store.history.diff import Difference, diff_runs
from areal_tasks.store.history.diff_curves import Section
from flows.cli.inspect import AsJson, StoreUrl

Name = Annotated[str, typer.Argument(help="Name of a run.")]


def diff(a: Name, b: Name, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Where two runs first differ (recipe, code, inputs, outputs), and how their curves compare."""
    found = diff_runs(open_store(store), a, b)
    if as_json:
        typer.echo(json.dumps(as_values(found), default=str, indent=1))
        return
    for line in summary(found):
        typer.echo(line)
    if found.fields:
        typer.echo()
        show_sections([Section("recipe", [_field_row(found, change) for change in map(asdict, found.fields)])])
    if not found.same:
        typer.echo()
        show_sections([found.curves])


def as_values(found: Difference) -> dict[str, Any]:
    """A difference as values for JSON."""
    values = asdict(found)
    first = found.first
    return values | {
        "same": found.same,
        "first": asdict(first) | {"cause": first.cause} if first else None,
        "curves": list(found.curves.rows),
    }


def summary(found: Difference) -> list[str]:
    """What differs, as lines of text; tables of fields and curves follow it."""
    lines = [
        f"{name}: {length} iterations{f', {origin}' if origin else ''}"
        for name, length, origin in zip(found.names, found.lengths, found.origins, strict=True)
    ]
    if found.shared:
        lines.append(f"shared: the commits of iterations 0 to {found.shared - 1}")
    lines += [f"code, from iteration {k}: {a} and {b}" for k, a, b in found.code]
    lines += [
        f"only in {name}: {', '.join(stages)}" for name, stages in zip(found.names, found.only, strict=True) if stages
    ]
    return [*lines, *_verdict(found)]


def _verdict(found: Difference) -> list[str]:
    first, common = found.first, min(found.lengths)
    if first is None:
        more = "" if found.lengths[0] == found.lengths[1] else f" in the {common} iterations that both have"
        return [f"no difference in what was built{more}" if more or found.only != ((), ()) else "no difference"]
    return [
        f"first difference: iteration {first.iteration}, {first.stage}: {first.cause}",
        f"  asked: {first.asked} · inputs: {first.inputs} · code: {_one(first.code)}",
        *(f"  {path}" for path in first.paths if path),
    ]


def _one(pair: tuple[str, str]) -> str:
    return pair[0] if pair[0] == pair[1] else " and ".join(pair)


def _field_row(found: Difference, change: dict[str, Any]) -> dict[str, Any]:
    return {
        "field": change["field"],
        found.names[0]: change["a"],
        found.names[1]: change["b"],
        "from iteration": change["iteration"],
        "kind": "semantic" if change["semantic"] else "operational",
    }


def show_sections(sections: Sequence[Section]) -> None:
    """Print comparisons as tables; long cells are folded."""
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    for section in sections:
        table = Table(title=section.title, title_justify="left")
        for name in section.rows[0] if section.rows else ["(no rows)"]:
            table.add_column(name, overflow="fold")
        for row in section.rows:
            table.add_row(*(cell(value) for value in row.values()))
        console.print(table)


def cell(value: Any) -> str:
    """A value as text in a table cell."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
