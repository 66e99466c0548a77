"""The views of one run, in one schema of a DuckDB connection, and those of several runs as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Final

import duckdb

from areal_tasks.store.backend import StoreError
from areal_tasks.store.catalog import DERIVED, Catalog
from areal_tasks.store.objects.inventory import check_sha256
from areal_tasks.store.record_tables import log_table, segments_table, spool_table, starts_table
from areal_tasks.store.scan import LazyDataset, derived_dataset, table_dataset
from areal_tasks.store.system import system_table
from schemas.manifest import FileRef
from schemas.views import LOG, SEGMENTS, SHARED, SPOOL, STARTS, SYSTEM, VIEWS, View

#: Views with a column `run` of their own: the run that made what the row describes, which may be a parent.
_MADE_BY: Final = frozenset({"stages", "commits", "segments"})


class RunViews:
    """The views of a run: one per table (with the iteration), those of `schemas.views.VIEWS`, and those of its records.

    Views in a schema see each other there, and not those of the same name elsewhere.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, catalog: Catalog, schema: str) -> None:
        self.connection = connection
        self.catalog = catalog
        self.schema = schema
        self.tables = catalog.stages_of.keys()
        self.tables_by_view = tables_by_view(catalog)
        self.views = _views(self.tables_by_view.keys())
        self.lazies = _datasets(catalog, self.tables_by_view)
        _create_views(connection, schema, self.lazies)
        self.defined: dict[str, str] = {}
        self.define(frozenset())

    @property
    def names(self) -> list[str]:
        """The names of all views."""
        return sorted({*self.lazies, *(view.name for view in self.views)})

    def define(self, unused: Set[str]) -> None:
        """Define the views without joins with the tables `unused`, where they are not yet."""
        for view in self.views:
            text = view.define(self.tables_by_view.keys(), unused, self.schema)
            if self.defined.get(view.name) != text:
                self.connection.execute(text)
                self.defined[view.name] = text

    def unused(self, words: Set[str]) -> set[str]:
        """The joined tables none of whose columns is among `words`."""
        joins = [join for view in self.views for join in view.joins]
        used = {join.table for join in joins if not words.isdisjoint(join.columns.values())}
        return {join.table for join in joins} - used

    def drop_damaged_compactions(self) -> bool:
        """If a scan failed on a damaged compaction, read the source files from now on; whether it did."""
        damage = self._damage(file for table in self._failed() for file in self.catalog.merged_files(table))
        if damage is not None:
            self.catalog.ignore_compactions(damage)
        return damage is not None

    def damage(self) -> StoreError | None:
        """The error of a damaged shard that made a scan fail; None if the failure has another cause."""
        return self._damage(shard for table in self._failed() for _, shard in self.catalog.shards(table))

    def _failed(self) -> list[str]:
        """The tables whose scan failed."""
        return [
            self.tables_by_view[name]
            for name, lazy in self.lazies.items()
            if lazy.failure and name in self.tables_by_view
        ]

    def _damage(self, files: Iterable[FileRef]) -> StoreError | None:
        """What is wrong with the first of these files that is not whole."""
        for file in files:
            try:
                check_sha256(self.catalog.run.store, file)
            except StoreError as damage:
                return damage
        return None


def _datasets(catalog: Catalog, tables_by_view: Mapping[str, str]) -> dict[str, LazyDataset]:
    """The data sets that SQL scans, by name. They must not refer to the connection, which would then never be freed."""
    made = {name: table_dataset(catalog, table) for name, table in tables_by_view.items()}
    made |= {name: derived_dataset(schema, partial(catalog.rows, name)) for name, schema in DERIVED.items()}
    made["log"] = derived_dataset(LOG, lambda: log_table(catalog.run))
    made["starts"] = derived_dataset(STARTS, lambda: starts_table(catalog))
    made["segments"] = derived_dataset(SEGMENTS, lambda: segments_table(catalog.run))
    made["system"] = derived_dataset(SYSTEM, lambda: system_table(catalog.run))
    made["spool"] = derived_dataset(SPOOL, lambda: spool_table(catalog.run))
    return made


def _create_views(connection: duckdb.DuckDBPyConnection, schema: str, datasets: Mapping[str, LazyDataset]) -> None:
    """Create a view of each data set in a schema."""
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    connection.execute(f"SET schema = '{schema}'")
    for name, dataset in datasets.items():
        connection.from_arrow(dataset).create_view(name)
    connection.execute("SET schema = 'main'")


def tables_by_view(catalog: Catalog) -> dict[str, str]:
    """The name of each view of a table in SQL, and the table.

    A replay that ends before the stage `scalars` has that table only for iterations shared with its parent, if any.
    """
    names = {name: name for name in sorted(catalog.stages_of)}
    if catalog.run.record.replay_until and "scalars" in names:
        names[SHARED] = names.pop("scalars")
    return names


def _views(tables: Set[str]) -> list[View]:
    """For each name, the first view whose tables, or views before it, exist."""
    found: dict[str, View] = {}
    for view in VIEWS:
        if view.name not in tables and view.needs <= tables | found.keys():
            found.setdefault(view.name, view)
    return list(found.values())


def create_joint_views(connection: duckdb.DuckDBPyConnection, runs: Sequence[RunViews], several: bool) -> None:
    """Create views on the connection with the rows of all runs, and the column `run`.

    Where a view has its own column `run` (the run that made the row), it is called `made_by` if `several`; else it is
    the only one.
    """
    for name in sorted({name for run in runs for name in run.names}):
        parts = [f"SELECT {_columns(run, name, several)} FROM {run.schema}.{name}" for run in runs if name in run.names]
        connection.execute(f"CREATE VIEW {name} AS {' UNION ALL BY NAME '.join(parts)}")


def _columns(run: RunViews, view: str, several: bool) -> str:
    of_run = f"'{run.catalog.run.name}' AS run"
    if view not in _MADE_BY:
        return f"{of_run}, *"
    return f"{of_run}, * RENAME (run AS made_by)" if several else "*"


def words_of_plan(connection: duckdb.DuckDBPyConnection, query: str) -> set[str]:
    """The words of a query's plan, which names the columns of every scan; empty if there is none."""
    try:
        plan = connection.execute(f"EXPLAIN (FORMAT JSON) {query}").fetchall()[0][1]
    except duckdb.Error:  # the query itself will say what is wrong; DESCRIBE cannot be explained
        return set()
    return set(re.findall(r"\w+", plan))
