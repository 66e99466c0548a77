"""SQL over a run: DuckDB views of what its commits select, and of nothing else.

DuckDB itself may open no file at all. Tables are Arrow data sets whose files, iterations and order come from the
manifests; they are opened when a query scans them, only for the columns and iterations that it needs, on disk and
on S3 alike.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.tables import TABLES
from schemas.views import VIEWS

_FORMAT: Final = ds.ParquetFileFormat()
_META: Final = frozenset({"stages", "commits"})
_ITERATION: Final = pa.field("iteration", pa.int32(), nullable=False)
_ONE_SELECT: Final = "Ask one question at a time: a single SELECT (or DESCRIBE, SUMMARIZE, EXPLAIN)."


def connect(store: Store, run: str) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with all views of the run and no access to anything else.

    Views: one per table (with the iteration), `samples`, `tokens`, `stages`, `commits`.
    """
    catalog = Catalog(load_run(store, run))
    return _connect(catalog, _META | catalog.stages_of.keys())


def run_sql(store: Store, run: str, query: str) -> pa.Table:
    """The answer to one SELECT over the run's views.

    Raises:
        UserError: there is no such run, the query is no single SELECT, or DuckDB refuses it (its message, and the
            views there are).
    """
    _check_statement(query)
    catalog = Catalog(load_run(store, run))
    views = sorted(_META | catalog.stages_of.keys() | _derived(catalog.stages_of.keys()))
    with _connect(catalog, _mentioned(query, catalog.stages_of.keys())) as connection:
        try:
            return _answer(connection, query)
        except duckdb.Error as error:
            raise UserError(f"{error}\nViews of run {run!r}: {', '.join(views)}.") from error


def _answer(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    answer: pa.Table = connection.sql(query).to_arrow_table()
    return answer


def _check_statement(query: str) -> None:
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise UserError(f"{error}\n{_ONE_SELECT}") from error
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise UserError(f"This is not a question that can be put to a run. {_ONE_SELECT}")


def _mentioned(query: str, tables: Set[str]) -> Set[str]:
    """The tables and meta views that `query` needs; all of them where its text does not tell (SHOW TABLES)."""
    everything = _META | tables
    with duckdb.connect() as empty:
        try:
            names = {name.lower() for name in empty.get_table_names(query)}
        except duckdb.Error:  # the real connection will say what is wrong
            return everything
    for view in VIEWS:
        if view.name in names:
            names |= view.needs | view.optional
    return names & everything or everything


def _derived(tables: Set[str]) -> set[str]:
    return {view.name for view in VIEWS if view.needs <= tables}


def _connect(catalog: Catalog, wanted: Set[str]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"enable_external_access": "false", "autoload_known_extensions": "false"})
    connection.execute("SET python_enable_replacements = false")
    tables = wanted - _META
    for name in sorted(tables):
        connection.register(name, _dataset(catalog, name))
    if "stages" in wanted:
        connection.register("stages", catalog.stages_table())
    if "commits" in wanted:
        connection.register("commits", catalog.commits_table())
    _define_views(connection, tables)
    connection.execute("SET lock_configuration = true")
    return connection


def _define_views(connection: duckdb.DuckDBPyConnection, tables: Set[str]) -> None:
    made: set[str] = set()
    for view in VIEWS:
        if view.needs <= tables and view.name not in made:
            connection.execute(view.define(tables))
            made.add(view.name)


def _dataset(catalog: Catalog, table: str) -> ds.Dataset:
    """A table's shards as one lazy data set with the column `iteration`, by which whole files are passed over."""
    filesystem, root = catalog.run.store.arrow()
    fragments = [
        _FORMAT.make_fragment(f"{root}/{shard.path}", filesystem, ds.field("iteration") == iteration)
        for iteration, shard in catalog.shards(table)
    ]
    fields = [field for field in TABLES[table] if field.name != "iteration"]
    return ds.FileSystemDataset(fragments, pa.schema([_ITERATION, *fields]), _FORMAT, filesystem)
