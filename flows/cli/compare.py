"""`arealflow diff` and `report`: two runs compared line by line; curves and rollouts of runs as an HTML page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.history.diff import Difference, diff_runs
from flows.cli.output import AsJson, RunName, StoreUrl, echo, print_json, show_compared
from schemas.errors import UserError


def diff(a: RunName, b: RunName, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Where two runs first differ (recipe, code, inputs, outputs), and how their curves compare."""
    found = diff_runs(open_store(store), a, b)
    if as_json:
        first = asdict(found.first) | {"cause": found.first.cause} if found.first else None
        values = asdict(found) | {"same": found.same, "first": first, "curves": list(found.curves.rows)}
        print_json(values)
        return
    for line in summary(found):
        echo(line)
    if found.fields:
        echo()
        rows = [
            {
                "field": change.field,
                found.names[0]: change.a,
                found.names[1]: change.b,
                "from iteration": change.iteration,
                "kind": "semantic" if change.semantic else "operational",
            }
            for change in found.fields
        ]
        show_compared("recipe", rows)
    if not found.same:
        echo()
        show_compared(found.curves.title, found.curves.rows)


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
        f"  request: {first.request} · inputs: {first.inputs} · code: {' and '.join(dict.fromkeys(first.code))}",
        *(f"  {path}" for path in first.paths if path),
    ]


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
    try:
        target.write_text(html, encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): name another file with --out.") from error
    size = target.stat().st_size / 1e6
    echo(f"{target}: {size:.2f} MB, {made.embedded} of {made.available} samples. Open it in any browser.")
    for run in made.payload["runs"]:
        for line in (*([run["state"]] if not run["state"].startswith("Finished") else []), *run["problems"]):
            echo(f"{run['name']}: {line}")
