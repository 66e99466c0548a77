"""Options that several commands have, and how text, rows and JSON are printed: all output of the commands."""

from __future__ import annotations

import codecs
import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Final

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


#: What a terminal obeys: all controls but tabs and line ends, and those that change the order of text.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COLOURS: Final = re.compile("\x1b\\[[0-9;]*m|\r(?=\n)")
#: The signs of our own messages in ASCII.
_SPELLED: Final = dict(zip("─…·–−×→“”", ("-", "...", "-", "-", "-", "x", "->", '"', '"'), strict=True))


def fit_streams() -> None:
    """From now on, have output and errors escape characters that their encoding lacks, such as a lone surrogate."""
    codecs.register_error("escaped", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="escaped")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(c) or c.encode("unicode_escape").decode() for c in missing), error.end


def visible(text: str) -> str:
    """The text with escapes in place of control characters, which data may hold and a terminal would obey."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def uncoloured(text: str) -> str:
    """The text without a terminal's colours, and with line ends for returns to its margin, as of progress bars."""
    return _COLOURS.sub("", text).replace("\r", "\n")


def echo(text: str = "", err: bool = False, end: str = "\n") -> None:
    """Print text, of which any part may come from data."""
    print(visible(text), file=sys.stderr if err else sys.stdout, end=end, flush=True)


def json_text(value: Any, line: str = "") -> str:
    """Strict JSON, with all digits of a number; NaN and infinities, which JSON lacks, are null, bytes hexadecimal.

    Args:
        line: the line end and indentation before each part and the closing bracket; empty: all is in one line.
    """
    inner = line and f"{line} "
    match value:
        case None | bool() | int() | str():
            return json.dumps(value)
        case float() | Decimal():
            return str(value) if math.isfinite(value) else "null"
        case Mapping():
            parts, ends = [f"{json.dumps(str(key))}: {json_text(part, inner)}" for key, part in value.items()], "{}"
        case list() | tuple():
            parts, ends = [json_text(part, inner) for part in value], "[]"
        case _:
            return json.dumps(value.hex() if isinstance(value, bytes) else str(value))
    return f"{ends[0]}{inner}{(',' + (inner or ' ')).join(parts)}{line}{ends[1]}" if parts else ends


def print_json(value: Any) -> None:
    """Print JSON, in ASCII, so that it is exact on any terminal."""
    echo(json_text(value, "\n"))


def show(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "", vertical: bool = False) -> None:
    """Print rows as JSON or as a table. With `vertical`, long cells are cut, or a wide table is printed as lines."""
    if as_json:
        print_json(list(rows))
        return
    if title:
        echo(title)
    table = table_of(rows, CELL if vertical else 0)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    if vertical and console.measure(table, options=console.options.update(max_width=10**6)).maximum > console.width:
        for number, row in enumerate(rows, 1):
            lines = (f"{name}: {_text(value)}".replace("\n", "\n    ") for name, value in row.items())
            echo("\n".join([f"── row {number} ──", *lines]))
    else:
        console.print(table)


def table_of(rows: Sequence[Mapping[str, Any]], longest: int = 0) -> Table:
    """Rows as a table for a terminal, with cells of at most `longest` characters (0: of any length)."""
    table = Table()
    for name in rows[0] if rows else ["(no rows)"]:
        table.add_column(visible(name), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value, longest) for value in row.values()))
    return table


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value))


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
