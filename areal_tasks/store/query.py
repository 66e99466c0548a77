"""SQL over a run: DuckDB views of what its commits select, and of nothing else.

DuckDB itself may open no file at all. Tables are lazy Arrow data sets whose files, iterations and order come from the
manifests; they are opened when a query scans them, only for the columns and iterations that it needs, on disk and
on S3 alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import duckdb
import pyarrow as pa

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.commit import verified
from areal_tasks.store.record_tables import log_table, segments_table
from areal_tasks.store.runs import load_run
from areal_tasks.store.scan import Lazy, derived_dataset, table_dataset
from schemas.errors import UserError
from schemas.views import COMMITS, LOG, SEGMENTS, SHARDS, SHARED, STAGES, VIEWS, View

_META: Final = frozenset({"stages", "commits", "shards", "log", "segments"})
_ONE_SELECT: Final = "Ask one question at a time: a single SELECT (or DESCRIBE, SUMMARIZE, EXPLAIN)."
_UNREADABLE: Final = re.compile(r"stream registered as '(\w+)' failed")  # DuckDB's words


class Session:
    """A run open for questions, as it was committed when this was made. A context manager.

    Views: one per table (with the iteration), those of `schemas.views.VIEWS`, `stages`, `commits`, `shards`, `log`,
    `segments`.
    Many questions in one session share what they have read: the catalog, and what was verified of compacted tables.
    """

    def __init__(self, store: Store, run: str, *, compacted: bool = True) -> None:
        self.catalog = Catalog(load_run(store, run), compacted)
        self.tables = self.catalog.stages_of.keys()
        self.connection = duckdb.connect(
            config={"enable_external_access": "false", "autoload_known_extensions": "false"}
        )
        self.shown = shown(self.catalog)
        self.lazies = _register(self.connection, self.catalog, self.shown)
        self.defined: dict[str, str] = {}
        self.views = _views(self.shown.keys())
        self._define(frozenset())
        self.connection.execute("SET lock_configuration = true")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def sql(self, query: str) -> pa.Table:
        """The answer to one SELECT over the run's views.

        Raises:
            UserError: the query is no single SELECT, DuckDB refuses it (its message, and the views there are), or a
                file of the store is damaged.
        """
        check_statement(query)
        self._define(frozenset())
        self._define(self._spared(query))
        with self.explained() as connection:
            answer: pa.Table = connection.sql(query).to_arrow_table()
        return answer

    @contextmanager
    def explained(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The connection, for the program's own questions: what fails inside is the UserError that `sql` would raise.

        It has the views of `sql`, and no access to anything else.
        """
        for lazy in self.lazies:
            lazy.failure = None
        try:
            yield self.connection
        except duckdb.Error as error:
            raise self._explained(error) from error

    def _define(self, spared: Set[str]) -> None:
        for view in self.views:
            text = view.define(self.shown.keys(), spared)
            if self.defined.get(view.name) != text:
                self.connection.execute(text)
                self.defined[view.name] = text

    def _spared(self, query: str) -> set[str]:
        """The joined tables none of whose columns the query's plan mentions: their joins need not be made.

        The plan names the columns of every scan. Where it cannot be had, or does not name them, all joins are made.
        """
        try:
            plan = self.connection.execute(f"EXPLAIN (FORMAT JSON) {query}").fetchall()[0][1]
        except duckdb.Error:  # the query itself will say what is wrong; DESCRIBE cannot be explained
            return set()
        words = set(re.findall(r"\w+", plan))
        joins = [join for view in self.views for join in view.joins] if "sample_id" in words else []
        used = {join.table for join in joins if any(column.source in words for column in join.columns)}
        return {join.table for join in joins} - used

    def _damage(self, message: str) -> StoreError | None:
        """The damaged shard because of which a table could not be read; none where the failure has another cause."""
        table = _UNREADABLE.search(message)
        if table is None or table[1] not in self.tables:
            return None
        for _, shard in self.catalog.shards(table[1]):
            try:
                verified(self.catalog.run.store, shard.path, shard.sha256)
            except StoreError as damage:
                return damage
        return None

    def _explained(self, error: duckdb.Error) -> UserError:
        failures = [lazy.failure for lazy in self.lazies if isinstance(lazy.failure, UserError)]
        if failures:
            return UserError(str(failures[0]))
        if (damage := self._damage(str(error))) is not None:
            return damage
        names = sorted(_META | self.tables | {view.name for view in self.views})
        return UserError(f"{error}\nViews of run {self.catalog.run.name!r}: {', '.join(names)}.")


def run_sql(store: Store, run: str, query: str) -> pa.Table:
    """The answer to one SELECT over the run's views.

    Raises:
        UserError: there is no such run, or as `Session.sql`.
    """
    check_statement(query)
    with Session(store, run) as session:
        return session.sql(query)


def check_statement(query: str) -> None:
    """UserError unless DuckDB's own parser calls `query` a single SELECT, DESCRIBE, SUMMARIZE or EXPLAIN."""
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise UserError(f"{error}\n{_ONE_SELECT}") from error
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise UserError(f"This is not a question that can be put to a run. {_ONE_SELECT}")


def shown(catalog: Catalog) -> dict[str, str]:
    """By the names that SQL sees, the run's tables.

    A replay that ends before the stage `scalars` has that table only of what it shares with its parent, if anything.
    """
    names = {name: name for name in sorted(catalog.stages_of)}
    if catalog.run.record.replay_until and "scalars" in names:
        names[SHARED] = names.pop("scalars")
    return names


def _views(tables: Set[str]) -> list[View]:
    """Of each name the first view whose tables, or views before it, there are."""
    found: dict[str, View] = {}
    for view in VIEWS:
        if view.name not in tables and view.needs <= tables | found.keys():
            found.setdefault(view.name, view)
    return list(found.values())


def _register(connection: duckdb.DuckDBPyConnection, catalog: Catalog, names: Mapping[str, str]) -> list[Lazy]:
    connection.execute("SET python_enable_replacements = false")
    made = {name: table_dataset(catalog, table) for name, table in names.items()}
    made["stages"] = derived_dataset(STAGES, catalog.stages_table)
    made["commits"] = derived_dataset(COMMITS, catalog.commits_table)
    made["shards"] = derived_dataset(SHARDS, catalog.shards_table)
    made["log"] = derived_dataset(LOG, lambda: log_table(catalog.run))
    made["segments"] = derived_dataset(SEGMENTS, lambda: segments_table(catalog.run))
    for name, dataset in made.items():
        connection.register(name, dataset)
    return list(made.values())
