"""SQL over one or several runs: DuckDB views of what their commits select, and of nothing else.

DuckDB itself cannot open any file. Tables are lazy Arrow data sets whose files, iterations and order come from the
manifests; they are opened when a query scans them, only for the columns and iterations that it needs, on disk and
on S3 alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from decimal import Decimal
from functools import partial
from itertools import chain, count
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa

from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import DERIVED, Catalog
from areal_tasks.store.parallel import parallel
from areal_tasks.store.record_tables import log_table, segments_table, spool_table, starts_table
from areal_tasks.store.runs import load_run
from areal_tasks.store.scan import DamagedCopy, derived_dataset, table_dataset
from areal_tasks.store.system import system_table
from schemas.errors import UserError
from schemas.views import LOG, SEGMENTS, SHARED, SPOOL, STARTS, SYSTEM, VIEWS, View

A = TypeVar("A")


class Session(AbstractContextManager["Session"]):
    """One or several runs, open for queries, as they were committed when the session was made. A context manager.

    Views: one per table (with the iteration), those of `schemas.views.VIEWS`, `stages`, `commits`, `shards`, `log`,
    `starts`, `segments`, `spool`, `system`. Each has the rows of all runs, and the column `run`. `several` gives one
    run the columns of several.
    The queries of a session share what they have read: the catalog, and small files.
    """

    def __init__(self, store: Store, *names: str, compacted: bool = True, several: bool = False) -> None:
        """Raises UserError: a run is named twice, does not exist, or none is named."""
        several = several or len(names) > 1
        if not names or len(set(names)) < len(names):
            raise UserError(f"Name one run or several, each once; given: {', '.join(names) or 'none'}.")
        catalogs = parallel(lambda name: Catalog(load_run(store, name), compacted), names)
        parallel(lambda catalog: catalog.stages_of, catalogs)  # read here, in parallel for several runs
        self.connection = duckdb.connect(
            config={"enable_external_access": "false", "autoload_known_extensions": "false"}
        )
        self.connection.execute("SET python_enable_replacements = false")
        schemas = [f"run_{i}" for i in range(len(names))]
        self.runs = [RunViews(self.connection, *part) for part in zip(catalogs, schemas, strict=True)]
        for name in sorted({name for run in self.runs for name in run.names}):
            parts = [run.select(name, several) for run in self.runs if name in run.names]
            self.connection.execute(f"CREATE VIEW {name} AS {' UNION ALL BY NAME '.join(parts)}")
        self.connection.execute("SET lock_configuration = true")

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def sql(self, query: str) -> pa.Table:
        """The answer to one SELECT over the run's views.

        Raises UserError: the query is no single SELECT, DuckDB refuses it (its message, and a list of the views), or a
        file of the store is damaged.
        """
        return self._answer(query, lambda found: _exact(found, _NOT_IN_ARROW).to_arrow_table())

    def rows(self, query: str) -> list[dict[str, Any]]:
        """As `sql`, as Python values that lose nothing: Arrow has no integers of 128 bits."""
        return self._answer(query, _python_rows)

    def _answer(self, query: str, take: Callable[[duckdb.DuckDBPyRelation], A]) -> A:
        check_statement(query)
        for run in self.runs:
            run.define(frozenset())
        self._drop_unused_joins(query)
        return self.ask(lambda connection: take(connection.sql(query)))

    def ask(self, work: Callable[[duckdb.DuckDBPyConnection], A]) -> A:
        """The result of `work`, the program's own queries; its error becomes the UserError that `sql` would raise.

        The connection has the views of `sql`, and no access to anything else. If a compaction is found to be damaged,
        `work` is done again, from the source files.
        """
        for run in self.runs:
            for lazy in run.lazies.values():
                lazy.failure = None
        try:
            return work(self.connection)
        except duckdb.Error as error:
            failures = [(run, lazy.failure) for run in self.runs for lazy in run.lazies.values() if lazy.failure]
            for run, failure in failures:
                if isinstance(failure, DamagedCopy):
                    run.catalog.ignore_compactions(failure)
                    return self.ask(work)
                if isinstance(failure, UserError):
                    raise UserError(str(failure)) from error
            raise self._explained(error) from error

    def _drop_unused_joins(self, query: str) -> None:
        """Leave out the joins with tables none of whose columns the query needs.

        The plan names the columns of every scan. If there is no plan, or it does not name them, no join is left out.
        """
        try:
            plan = self.connection.execute(f"EXPLAIN (FORMAT JSON) {query}").fetchall()[0][1]
        except duckdb.Error:  # the query itself will say what is wrong; DESCRIBE cannot be explained
            return
        words = set(re.findall(r"\w+", plan))
        if "sample_id" in words:
            for run in self.runs:
                run.define(run.unused(words))

    def _explained(self, error: duckdb.Error) -> UserError:
        names = sorted({name for run in self.runs for name in run.names})
        runs = " and ".join(repr(run.catalog.run.name) for run in self.runs)
        return UserError(f"{error}\nViews of run {runs}: {', '.join(names)}.")


def run_sql(store: Store, run: str, query: str) -> pa.Table:
    """The answer to one SELECT over the run's views. Raises UserError: there is no such run, or as `Session.sql`."""
    with Session(store, run) as session:
        return session.sql(query)


def check_statement(query: str) -> None:
    """UserError unless DuckDB's own parser takes `query` for a single SELECT, DESCRIBE or SUMMARIZE, or an EXPLAIN of
    one: EXPLAIN ANALYZE executes what it explains."""
    try:
        query.encode()
        types = [statement.type for statement in duckdb.extract_statements(query)]
    except (duckdb.Error, UnicodeEncodeError) as error:
        raise UserError(str(error)) from error
    if types == [duckdb.StatementType.EXPLAIN]:
        types = _explained_types(query)
    if types != [duckdb.StatementType.SELECT]:
        raise UserError(
            "This is not a query that a run can answer. "
            "Pass one query at a time: a single SELECT (or DESCRIBE, SUMMARIZE, EXPLAIN)."
        )


def _explained_types(query: str) -> list[duckdb.StatementType]:
    """The type of the statement that an EXPLAIN explains: the first one that begins at a word after EXPLAIN."""
    text = query.encode()  # DuckDB counts bytes
    starts = [start for start, kind in duckdb.tokenize(query) if kind != duckdb.token_type.comment]
    for start in starts[1:]:
        with suppress(duckdb.Error):
            return [statement.type for statement in duckdb.extract_statements(text[start:].decode())]
    return []


#: Types whose values text keeps, and Arrow or Python's own types do not.
_NOT_IN_ARROW: Final = ("INTERVAL", "UHUGEINT", "BIGNUM", "BIT")
_NOT_IN_PYTHON: Final = ("INTERVAL", "TIMESTAMP_NS", "TIMESTAMPTZ_NS", "TIME_NS")


def _exact(found: duckdb.DuckDBPyRelation, texts: Sequence[str]) -> duckdb.DuckDBPyRelation:
    """The answer with its columns of the types `texts` as text, and with a number behind a name that occurs again."""
    if set(texts).isdisjoint(map(str, found.types)) and len(set(found.columns)) == len(found.columns):
        return found
    parts, taken = [], set[str]()
    for number, (name, kind) in enumerate(zip(found.columns, map(str, found.types), strict=True), 1):
        own = next(one for one in chain([name], (f"{name}_{n}" for n in count(1))) if one not in taken)
        taken.add(own)
        parts.append(f"#{number}{'::VARCHAR' if kind in texts else ''} AS {quoted(own)}")
    return found.project(", ".join(parts))


def quoted(name: str) -> str:
    """A column's name as SQL takes any."""
    return '"' + name.replace('"', '""') + '"'


def _python_rows(found: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    exact = _exact(found, _NOT_IN_PYTHON)
    whole = {name for name, kind in zip(exact.columns, found.types, strict=True) if str(kind) == "BIGNUM"}  # as text
    rows = (zip(exact.columns, row, strict=True) for row in exact.fetchall())
    return [{name: Decimal(value) if value and name in whole else value for name, value in row} for row in rows]


# ── the views of one run ──────────────────────────────────────────────────────────────────────────────────────────────


#: Views with a column `run` of their own: the run that made what the row describes, which may be a parent.
_MADE_BY: Final = frozenset({"stages", "commits", "segments"})
#: Views that are read from records: their columns and their rows.
_OF_RECORDS: Final[dict[str, tuple[pa.Schema, Callable[[Catalog], pa.Table]]]] = {
    "log": (LOG, lambda catalog: log_table(catalog.run)),
    "starts": (STARTS, starts_table),
    "segments": (SEGMENTS, lambda catalog: segments_table(catalog.run)),
    "system": (SYSTEM, lambda catalog: system_table(catalog.run)),
    "spool": (SPOOL, lambda catalog: spool_table(catalog.run)),
}


class RunViews:
    """The views of a run: one per table (with the iteration), those of `schemas.views.VIEWS`, and those of its records.

    Views in a schema see each other there, and not those of the same name elsewhere.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, catalog: Catalog, schema: str) -> None:
        self.connection = connection
        self.catalog = catalog
        self.schema = schema
        self.tables_by_view = tables_by_view(catalog)
        self.views = _views(self.tables_by_view.keys())
        # they must not refer to the connection, which would then never be freed
        lazies = {name: table_dataset(catalog, table) for name, table in self.tables_by_view.items()}
        lazies |= {name: derived_dataset(schema, partial(catalog.rows, name)) for name, schema in DERIVED.items()}
        lazies |= {name: derived_dataset(kind, partial(rows, catalog)) for name, (kind, rows) in _OF_RECORDS.items()}
        self.lazies = lazies  # the data sets that SQL scans, by name
        self.defined: dict[str, str] = {}
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        connection.execute(f"SET schema = '{schema}'")
        for name, dataset in self.lazies.items():
            without_nan(connection.from_arrow(dataset)).create_view(name)
        connection.execute("SET schema = 'main'")
        self.define(frozenset())

    @property
    def names(self) -> list[str]:
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

    def select(self, view: str, several: bool) -> str:
        """The query for the rows of a view, with the column `run`.

        Where a view has its own column `run` (the run that made the row), it is called `made_by` if `several`; else it
        is the only one.
        """
        if view in _MADE_BY and not several:
            columns = "*"
        else:
            columns = f"'{self.catalog.run.name}' AS run, *" + (" RENAME (run AS made_by)" if view in _MADE_BY else "")
        return f"SELECT {columns} FROM {self.schema}.{view}"


def without_nan(relation: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """The rows with NULL for NaN. DuckDB's aggregates leave out NULL alone: one NaN would be the mean of its group."""
    columns = zip(relation.columns, relation.types, strict=True)
    changed = [
        f"CASE WHEN NOT isnan({c}) THEN {c} END AS {c}"
        for c, kind in ((quoted(name), kind) for name, kind in columns)
        if str(kind) in ("FLOAT", "DOUBLE")
    ]
    return relation.project(f"* REPLACE ({', '.join(changed)})") if changed else relation


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
