"""`arealflow sql` asks and does nothing else: DuckDB's own parser says what is a SELECT, and no file can be reached."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import Session, check_statement, run_sql
from schemas.errors import UserError

RUN = Path(__file__).parents[1] / "fixtures" / "schema-1" / "run.tar.xz"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("sql")
    with tarfile.open(RUN) as archive:
        archive.extractall(folder, filter="data")
    return open_store(folder.as_uri())


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret.csv").write_text("a,b\n1,hidden\n")
    return tmp_path


STATEMENTS = (
    "COPY (SELECT 1) TO '{folder}/new'", "COPY scalars TO '{folder}/new' (FORMAT parquet)",
    "EXPORT DATABASE '{folder}'", "IMPORT DATABASE '{folder}'", "ATTACH '{folder}/new.db'", "DETACH memory",
    "USE memory", "CHECKPOINT", "VACUUM", "INSTALL httpfs", "LOAD httpfs",
    "PRAGMA database_list", "PRAGMA enable_profiling", "CALL pragma_version()",
    "SET threads = 1", "SET enable_external_access = true", "RESET lock_configuration", "SET VARIABLE x = 1",
    "CREATE TABLE t AS SELECT 1", "CREATE SECRET (TYPE s3)", "CREATE MACRO m() AS 1", "CREATE TEMP VIEW v AS SELECT 1",
    "DROP VIEW samples", "INSERT INTO scalars SELECT * FROM scalars", "UPDATE scalars SET reward = 1",
    "DELETE FROM scalars", "TRUNCATE scalars", "ALTER TABLE scalars RENAME TO s", "BEGIN", "COMMIT",
    "PREPARE p AS SELECT 1", "EXECUTE p", "SELECT 1; COPY (SELECT 1) TO '{folder}/new'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/new'", "WITH x AS (SELECT 1) INSERT INTO scalars SELECT * FROM x",
)  # fmt: skip

READS = (
    "SELECT * FROM read_csv('{file}')", "SELECT * FROM read_csv_auto('{file}')", "SELECT * FROM sniff_csv('{file}')",
    "SELECT * FROM read_text('{file}')", "SELECT * FROM read_blob('{file}')", "SELECT * FROM read_json('{file}')",
    "SELECT * FROM read_parquet('{folder}/*')", "SELECT * FROM parquet_metadata('{file}')", "SELECT * FROM '{file}'",
    "SELECT * FROM glob('{folder}/*')", "FROM '{file}'", "DESCRIBE '{file}'", "SUMMARIZE '{file}'",
    "SELECT * FROM query('FROM ''{file}''')", "SELECT * FROM query_table('{file}')",
    "SELECT * FROM read_csv('https://127.0.0.1:1/x.csv')", "SELECT * FROM 's3://bucket/x.parquet'",
    "SELECT (SELECT content FROM read_text('{file}'))", "EXPLAIN ANALYZE SELECT * FROM read_text('{file}')",
)  # fmt: skip


@pytest.mark.parametrize("query", (STATEMENTS[0], *READS))  # of the others see the next test
def test_nothing_but_the_run_can_be_asked(store: Store, secret: Path, query: str) -> None:
    before = sorted(path.name for path in secret.iterdir())
    with pytest.raises(UserError) as refused:
        run_sql(store, "old", query.format(file=secret / "secret.csv", folder=secret))
    assert "hidden" not in str(refused.value)
    assert sorted(path.name for path in secret.iterdir()) == before


EXPLAINS = ("", "EXPLAIN ", "explain/* SELECT 1; é */analyze ", "EXPLAIN (ANALYZE, FORMAT JSON) -- '\n")


@pytest.mark.parametrize("explain", EXPLAINS)
@pytest.mark.parametrize("query", [query for query in STATEMENTS if not query.startswith("EXPLAIN")])
def test_a_statement_is_refused_before_it_is_run(query: str, explain: str) -> None:
    """Also one that is only explained, if DuckDB can: with ANALYZE it would be executed."""
    with pytest.raises(UserError, match=r"a single SELECT|Parser Error" if explain else r"a single SELECT"):
        check_statement(explain + query.format(folder="/folder"))


@pytest.mark.parametrize("explain", EXPLAINS[1:])
def test_a_query_may_be_explained(store: Store, explain: str) -> None:
    for query in ("SELECT 1 AS é", "FROM scalars", "(SELECT 1)", "WITH x AS (SELECT 1) FROM x", "VALUES (1)"):
        assert run_sql(store, "old", explain + query).num_rows


@pytest.mark.parametrize("query", READS)
def test_the_connection_itself_reaches_no_file(store: Store, secret: Path, query: str) -> None:
    """Users of the connection from Python have no check of statements before it."""
    with Session(store, "old") as session, pytest.raises(Exception, match=r"."):
        session.connection.execute(query.format(file=secret / "secret.csv", folder=secret)).fetchall()


def test_questions_are_answered(store: Store) -> None:
    for query in (
        "SELECT 1",
        "FROM scalars LIMIT 1",
        "DESCRIBE samples",
        "SUMMARIZE scalars",
        "SHOW TABLES",
        "VALUES (1)",
    ):
        assert run_sql(store, "old", query).num_rows
