"""`arealflow compact`: merges a run's history into few files, so that queries stay fast."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.catalog import DERIVED, Catalog
from areal_tasks.store.retention.compact import compact_all
from areal_tasks.store.runs import load_run
from flows.cli.inspect import AsJson, StoreUrl, show
from schemas.compaction import SCALAR_TABLES


def compact(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
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
