"""SQL over one or several runs: DuckDB views of what their commits select, and of nothing else.

DuckDB itself cannot open any file. Tables are lazy Arrow data sets whose files, iterations and order come from the
manifests; they are opened when a query scans them, only for the columns and iterations that it needs, on disk and
on S3 alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

import duckdb
import pyarrow as pa

from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.parallel import parallel
from areal_tasks.store.run_views import RunViews, create_joint_views, words_of_plan
from areal_tasks.store.runs import load_run
from schemas.errors import UserError

A = TypeVar("A")


class Session:
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
        catalogs = parallel(lambda name: _opened(store, name, compacted), names)
        self.connection = duckdb.connect(
            config={"enable_external_access": "false", "autoload_known_extensions": "false"}
        )
        self.connection.execute("SET python_enable_replacements = false")
        schemas = [f"run_{i}" for i in range(len(names))]
        self.runs = [RunViews(self.connection, *part) for part in zip(catalogs, schemas, strict=True)]
        create_joint_views(self.connection, self.runs, several)
        self.connection.execute("SET lock_configuration = true")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def sql(self, query: str) -> pa.Table:
        """The answer to one SELECT over the run's views.

        Raises:
            UserError: the query is no single SELECT, DuckDB refuses it (its message, and a list of the views), or a
                file of the store is damaged.
        """
        check_statement(query)
        for run in self.runs:
            run.define(frozenset())
        self._drop_unused_joins(query)
        return self.ask(lambda connection: connection.sql(query).to_arrow_table())

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
            if any(run.drop_damaged_compactions() for run in self.runs):
                return self.ask(work)
            raise self._explained(error) from error

    def _drop_unused_joins(self, query: str) -> None:
        """Leave out the joins with tables none of whose columns the query needs.

        The plan names the columns of every scan. If there is no plan, or it does not name them, no join is left out.
        """
        words = words_of_plan(self.connection, query)
        if "sample_id" in words:
            for run in self.runs:
                run.define(run.unused(words))

    def _explained(self, error: duckdb.Error) -> UserError:
        failures = [lazy.failure for run in self.runs for lazy in run.lazies.values()]
        for failure in failures:
            if isinstance(failure, UserError):
                return UserError(str(failure))
        for run in self.runs:
            if (damage := run.damage()) is not None:
                return damage
        names = sorted({name for run in self.runs for name in run.names})
        runs = " and ".join(repr(run.catalog.run.name) for run in self.runs)
        return UserError(f"{error}\nViews of run {runs}: {', '.join(names)}.")


def _opened(store: Store, name: str, compacted: bool) -> Catalog:
    """A run's catalog that has read which tables there are."""
    catalog = Catalog(load_run(store, name), compacted)
    assert catalog.stages_of is not None  # read here, in parallel for several runs
    return catalog


def run_sql(store: Store, run: str, query: str) -> pa.Table:
    """The answer to one SELECT over the run's views.

    Raises:
        UserError: there is no such run, or as `Session.sql`.
    """
    check_statement(query)
    with Session(store, run) as session:
        return session.sql(query)


def check_statement(query: str) -> None:
    """UserError unless DuckDB's own parser takes `query` for a single SELECT, DESCRIBE, SUMMARIZE or EXPLAIN."""
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise UserError(str(error)) from error
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise UserError(
            "This is not a query that a run can answer. "
            "Pass one query at a time: a single SELECT (or DESCRIBE, SUMMARIZE, EXPLAIN)."
        )
