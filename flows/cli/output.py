"""Options that several commands have, and how their rows are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

RunName = Annotated[str, typer.Argument(help="Name of the run.")]
RecipeName = Annotated[str, typer.Argument(help="Name of a recipe in deployments/, or a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.field=value …; run=NAME names the run.")]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Folder or URL of the store; else AREALFLOW_STORE, else the default folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: Characters of a cell of `arealflow sql`, whose rows may hold whole texts.
CELL = 100


def show(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "", vertical: bool = False) -> None:
    """Print rows as JSON or as a table. With `vertical`, long cells are cut, or a wide table is printed as lines."""
    if as_json:
        typer.echo(json.dumps(list(rows), default=str, indent=1))
        return
    if title:
        typer.echo(title)
    table = table_of(rows, CELL if vertical else 0)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    if vertical and console.measure(table, options=console.options.update(max_width=10**6)).maximum > console.width:
        for number, row in enumerate(rows, 1):
            lines = (f"{name}: {_text(value)}".replace("\n", "\n    ") for name, value in row.items())
            typer.echo("\n".join([f"── row {number} ──", *lines]))
    else:
        console.print(table)


def table_of(rows: Sequence[Mapping[str, Any]], longest: int = 0) -> Table:
    """Rows as a table for a terminal, with cells of at most `longest` characters (0: of any length)."""
    table = Table()
    for name in rows[0] if rows else ["(no rows)"]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value, longest) for value in row.values()))
    return table


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(value: Any, longest: int) -> str:
    text = _text(value)
    return text if not longest or len(text) <= longest else f"{text[: longest - 1]}…"


def show_compared(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of a comparison of runs, with short numbers, and - where a run has no value."""
    show([{name: _compared(value) for name, value in row.items()} for row in rows], False, title)


def _compared(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
