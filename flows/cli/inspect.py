"""`arealflow plan`, `runs` and `sql`: what a recipe would build, the runs of a store, and SQL queries."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import typer

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.parallel import parallel
from areal_tasks.store.query import Session, check_statement
from areal_tasks.store.run_list import RunSummary, list_runs
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.waits import current_waits
from flows.cli.output import AsJson, Overrides, RecipeName, StoreUrl, echo, json_text, show
from flows.cli.projects import is_file
from flows.home import add_import_folder, logs_folder
from flows.pages import clock_text
from schemas.errors import UserError
from schemas.manifest import IterationCommit, WaitsRecord
from schemas.recipe.load import load_recipe, parse_recipe, run_and_changes

if TYPE_CHECKING:
    from areal_tasks.stages.planner import Plan
    from areal_tasks.stages.stage import Stage
    from schemas.recipe.recipe import Recipe


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    placement: Annotated[
        bool, typer.Option("--placement", help="Show on which machines and GPUs services run, instead.")
    ] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """The graph of stages that a recipe asks for; for an existing run, what is committed and what would be built."""
    name, changes = run_and_changes(overrides)
    loaded = load_recipe(recipe, changes)
    run = load_run(open_store(store or loaded.store.url), name) if name else None
    if placement:
        from flows.cli.placement import plan_placement, run_placement  # here: it imports what starts services

        run_placement(run, changes, as_json) if run else plan_placement(loaded, as_json)
        return
    if run:
        if is_file(recipe):
            add_import_folder(Path(recipe).parent)
        add_import_folder(Path.cwd())
        plan_run(run, changes, as_json)
        return

    from areal_tasks.stages.graphs import iteration_plan  # here: it imports torch, which takes seconds

    graph = iteration_plan(loaded, 0)
    show([stage_row(stage, graph) for stage in graph.stages], as_json, f"{loaded.flow} · {loaded.name}")


def plan_run(run: Run, changes: Sequence[str], as_json: bool) -> None:
    """Print the next iteration of a run by its own recipe, with changes such as a larger schedule.iterations."""
    from areal_tasks.engines.session import Engines
    from areal_tasks.stages.replay import loop_of

    recipe = next_recipe(run, changes)
    with Engines(run, recipe, logs_folder()) as engines:  # none of them starts
        loop = loop_of(run)(run, recipe, engines)
        head, complete = loop.head, loop.first >= loop.last
        graph, found = (loop.plan(loop.last - 1), {}) if complete else loop.standing()
    committed = {ref.stage: ref.path for ref in head.stages} if head else {}
    rows = []
    for stage in graph.stages:
        following = "-" if complete else f"reused: {found[stage.name].ref.path}" if stage.name in found else "built"
        rows.append(stage_row(stage, graph) | {"last committed": committed.get(stage.name, "-"), "next": following})
    show(rows, as_json, f"{recipe.flow} · run {run.label}: {progress(head, loop.last)}")


def next_recipe(run: Run, changes: Sequence[str]) -> Recipe:
    return parse_recipe(run.recipe_at(run.committed), run.name, changes)


def progress(head: IterationCommit | None, last: int) -> str:
    """`iterations 0–5 committed, next 6 of 12`."""
    if head is None:
        return "no iteration committed"
    following = f"next {head.iteration + 1} of {last}" if head.iteration + 1 < last else "nothing is left to build"
    return f"iterations 0–{head.iteration} committed, {following}"


def stage_row(stage: Stage, graph: Plan) -> dict[str, Any]:
    """A stage as a table row: what it reads, writes and waits for."""
    counts = {table: sum(r.startswith(f"{table}.") for r in stage.reads) for table in stage.inputs}
    reads = [f"{table} ({n} column{'s' if n != 1 else ''})" for table, n in counts.items()]
    carried = [f"{what} of the last iteration" for what in stage.carries]
    return {
        "stage": stage.name,
        "kind": str(stage.kind),
        "reads": ", ".join([*reads, *carried]) or "-",
        "writes": ", ".join(stage.writes),
        "waits for": ", ".join(sorted(graph.waits[stage.name])) or "-",
    }


def runs(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """The runs in the store."""
    place = open_store(store)
    root = place.local("")
    if root is not None and not root.exists():
        if store:
            raise UserError(f"there is no store at {place.url}: name another one")
        echo(f"there is no store at {place.url} yet: `arealflow run` creates one", err=True)
    found = list_runs(place)
    waits = parallel(lambda summary: _waits(place, summary), found)
    rows = map(run_object if as_json else run_row, found, waits)
    show(list(rows), as_json, "runs")


def _waits(store: Store, summary: RunSummary) -> WaitsRecord | None:
    """What a run waits for now; None, with a warning, if the record is damaged."""
    try:
        return None if summary.problem else current_waits(load_run(store, summary.name))
    except UserError as error:
        echo(f"what run {summary.name} waits for is not known: {error}", err=True)
        return None


def run_object(summary: RunSummary, waits: WaitsRecord | None) -> dict[str, Any]:
    """A run as a JSON object; `waits` is what it waits for, as of `reported`, by the clock of `reported_by`."""
    found = [wait.model_dump() for wait in waits.waits] if waits else []
    return asdict(summary) | {
        "waits": found,
        "reported": waits.told if waits else "",
        "reported_by": waits.host if waits else "",
    }


def run_row(summary: RunSummary, waits: WaitsRecord | None) -> dict[str, Any]:
    """A run as a table row: its parent, whether it is counterfactual, and what it waits for now."""
    row = asdict(summary)
    forked_at, counterfactual = row.pop("forked_at"), row.pop("counterfactual")
    row["created"] = row["created"] and clock_text(row["created"])
    kept = {"kind": f"{summary.kind}, counterfactual"} if counterfactual else {}
    parent = {"parent": f"{summary.parent}@{forked_at}"} if summary.parent else {}
    return row | kept | parent | {"waits for": waits_text(waits) if waits else ""}


def waits_text(waits: WaitsRecord) -> str:
    """The longest wait; its description comes last, since a long cell's end is cut.

    Of a flow on another machine also when it last reported: whether it still runs is not known here.
    """
    first, *others = waits.waits
    more = f" (and {len(others)} more)" if others else ""
    elsewhere = waits.host != socket.gethostname()
    as_of = f", as of {clock_text(waits.told)} by the clock of {waits.host}," if elsewhere else ""
    return f"since {clock_text(first.since)}{more}{as_of} {first.at}: {first.what}"


def sql(
    run: Annotated[str, typer.Argument(metavar="RUN[,RUN…]", help="Name of one run or several; none with --all.")],
    query: Annotated[str, typer.Argument(help='One SELECT; views: "SHOW TABLES".')] = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV; lists, maps and structs as JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Query all runs of the store.")] = False,
) -> None:
    """Query one run or several in SQL (DuckDB). The column `run` of each view names the row's run."""
    if every == bool(query):
        raise UserError('Give a run and a query: arealflow sql RUN "SELECT …", or arealflow sql --all "SELECT …".')
    place, statement = open_store(store), query or run
    check_statement(statement)
    named = [name for name in map(str.strip, run.split(",")) if name]
    with Session(place, *(readable_runs(place) if every else named), several=every) as session:
        if not as_csv:
            show(session.rows(statement), as_json, vertical=True)
            return
        result = session.sql(statement)
    show_csv(result)


def show_csv(table: pa.Table) -> None:
    """Print a table as CSV, its nested columns as JSON text; exactly, except to a terminal."""
    content = pa.BufferOutputStream()
    pa.csv.write_csv(flat(table), content)
    if sys.stdout.isatty():
        echo(content.getvalue().to_pybytes().decode().rstrip("\n"))
    else:
        sys.stdout.buffer.write(content.getvalue())


def csv_text(value: Any) -> str | None:
    return value.hex() if isinstance(value, bytes) else None if value is None else json_text(value)


def flat(table: pa.Table) -> pa.Table:
    """The table with nested columns, which Arrow cannot write as CSV, as JSON text, and bytes hexadecimal."""
    kinds = {field.name: field.type for field in table.schema}
    for name in [name for name, kind in kinds.items() if pa.types.is_nested(kind) or pa.types.is_binary(kind)]:
        rows = duckdb.from_arrow(table.select([name])).fetchall()  # has keys of any type, and dates beyond 9999
        texts = [csv_text(value) for (value,) in rows]
        table = table.set_column(table.column_names.index(name), name, pa.array(texts, pa.string()))
    return table


def readable_runs(store: Store) -> list[str]:
    """All readable runs of a store; prints a warning for each other run. UserError if there is none."""
    readable = []
    for summary in list_runs(store):
        if summary.problem:
            echo(f"left out: run {summary.name}: {summary.problem}", err=True)
        else:
            readable.append(summary.name)
    if not readable:
        raise UserError(f"There is no run in {store.url} that can be queried.")
    return readable
