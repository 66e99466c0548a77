"""`arealflow plan`, `runs` and `sql`: what a recipe would build, what there is, and questions to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.csv
import typer
from rich.console import Console
from rich.table import Table

from areal_tasks.store.backend import open_store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import RunSummary, list_runs, load_run
from flows.cli.overrides import run_and_changes
from schemas.manifest import IterationCommit
from schemas.recipe.load import load_recipe

if TYPE_CHECKING:
    from areal_tasks.stages.planner import Plan
    from areal_tasks.stages.stage import Stage

StoreUrl = Annotated[str, typer.Option("--store", help="Store URL; else AREALFLOW_STORE, else the default folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CELL = 100


def plan(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in deployments/, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value …; run=NAME: a run's state.")
    ] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """The graph of stages that a recipe asks for; for an existing run, what is committed and what would be built."""
    from areal_tasks.stages.graphs import iteration_plan  # torch: seconds that no other command should wait for

    name, changes = run_and_changes(overrides)
    loaded = load_recipe(recipe, changes)
    head = load_run(open_store(store or loaded.store.url), name).head() if name else None
    graph = iteration_plan(loaded, head.iteration + 1 if head else 0)
    rows = [stage_row(stage, graph, head) for stage in graph.stages]
    title = f"{loaded.flow} · {loaded.name}" + (f" · run {name}: {progress(head)}" if name else "")
    show(rows, as_json, title)


def progress(head: IterationCommit | None) -> str:
    return (
        "no iteration committed"
        if head is None
        else f"iterations 0–{head.iteration} committed, next {head.iteration + 1}"
    )


def stage_row(stage: Stage, graph: Plan, head: IterationCommit | None) -> dict[str, Any]:
    """What a person wants to know of a stage before it runs."""
    reads = [
        f"{table} ({len([r for r in stage.reads if r.startswith(table + '.')])} columns)" for table in stage.inputs
    ]
    carried = [f"{what} of the last iteration" for what in stage.carries]
    row = {
        "stage": stage.name,
        "kind": str(stage.kind),
        "reads": ", ".join([*reads, *carried]) or "-",
        "writes": ", ".join(stage.writes),
        "waits for": ", ".join(sorted(graph.waits[stage.name])) or "-",
    }
    if head is not None:
        refs = [r for r in head.stages if r.stage == stage.name]
        row["last committed"] = refs[-1].path if refs else "-"
        row["next"] = "reused" if stage.once and refs else "built"
    return row


def runs(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """The runs in the store."""
    found = list_runs(open_store(store))
    show([asdict(summary) if as_json else run_row(summary) for summary in found], as_json, "runs")


def run_row(summary: RunSummary) -> dict[str, Any]:
    """A run as a line for people: a child with its parent, and with what it kept of it."""
    row = asdict(summary)
    forked_at, counterfactual = row.pop("forked_at"), row.pop("counterfactual")
    kept = {"kind": f"{summary.kind}, counterfactual"} if counterfactual else {}
    return row | kept | ({"parent": f"{summary.parent}@{forked_at}"} if summary.parent else {})


def sql(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    query: Annotated[str, typer.Argument(help='One SELECT; views: "SHOW TABLES".')],
    store: StoreUrl = "",
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Ask a run in SQL (DuckDB)."""
    result = run_sql(open_store(store), run, query)
    if as_csv:
        pa.csv.write_csv(result, pa.output_stream(sys.stdout.buffer))
    else:
        show(result.to_pylist(), as_json)


def show(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "") -> None:
    """Rows as JSON, or as a table for people."""
    if as_json:
        typer.echo(json.dumps(list(rows), default=str, indent=1))
        return
    table = Table(title=title or None, title_justify="left")
    for name in rows[0] if rows else ["(no rows)"]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"
