"""`arealflow report`: curves and rollouts of one run or several as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_tasks.store.backend import open_store
from flows.cli.inspect import StoreUrl
from schemas.errors import UserError


def report(
    runs: Annotated[list[str], typer.Argument(help="Names of runs; several are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; else report-RUN.html here.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples of each run that the page holds, at most.")] = 400,
    max_mb: Annotated[float, typer.Option(min=0.5, max=500, help="Size of the page in MB, at most.")] = 5.0,
    store: StoreUrl = "",
) -> None:
    """One self-contained HTML page of curves and rollouts, readable offline."""
    from areal_tasks.report.page import make_page  # here: it imports DuckDB and numpy

    target = out or Path(f"report-{'-'.join(runs)}.html")
    html, made = make_page(open_store(store), runs, samples, int(max_mb * 1e6))
    _write(target, html)
    size = target.stat().st_size / 1e6
    typer.echo(f"{target}: {size:.2f} MB, {made.embedded} of {made.available} samples. Open it in any browser.")
    for run in made.payload["runs"]:
        for line in (*([run["state"]] if not run["state"].startswith("Finished") else []), *run["problems"]):
            typer.echo(f"{run['name']}: {line}")


def _write(target: Path, html: str) -> None:
    try:
        target.write_text(html, encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): name another file with --out.") from error
