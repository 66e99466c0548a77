"""SQL over several runs: each view has the rows of all, with the run they are of; and a connection from Python."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
import shlex
import sys
import tarfile
import weakref
from pathlib import Path
from typing import Any

import duckdb
import pytest
from stage_driver import drive, store_in, tiny, tiny_sft
from store_listing import listed

import arealflow
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.query import Session
from areal_tasks.store.runs import load_run
from flows.cli import main
from schemas.errors import UserError

RUN = Path(__file__).parents[1] / "fixtures" / "schema-1" / "run.tar.xz"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "views.md"
SHORT = {"evaluation": {"every": 0, "limit": 0, "max_new_tokens": 256}}
NAMES = ("a", "b", "child", "tuned")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with GRPO of two iterations, a fork of the first at iteration 1, and one of SFT."""
    folder = tmp_path_factory.mktemp("several")
    recipe = tiny(schedule={"iterations": 2}, **SHORT)
    drive(folder, "a", recipe)
    drive(folder, "b", tiny(seed=5, schedule={"iterations": 2}, **SHORT))
    drive(folder, "child", recipe, origin=Origin("a", 1))
    drive(folder, "tuned", tiny_sft(schedule={"iterations": 1}))
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> Store:
    return store_in(folder)


def rows(store: Store, names: tuple[str, ...], query: str) -> list[dict[str, Any]]:
    with Session(store, *names) as session:
        found: list[dict[str, Any]] = session.sql(query).to_pylist()
    return found


def views_of(store: Store, name: str) -> list[str]:
    return [str(row["name"]) for row in rows(store, (name,), "SHOW TABLES")]


def test_each_view_holds_the_rows_of_every_run_that_has_it(store: Store) -> None:
    every = {name: views_of(store, name) for name in NAMES}
    with Session(store, *NAMES) as session:
        assert [row["name"] for row in session.sql("SHOW TABLES").to_pylist()] == sorted(set().union(*every.values()))
        alone = {name: Session(store, name) for name in NAMES}
        for view in sorted(set().union(*every.values())):
            query = f"SELECT run, count(*) AS n FROM {view} GROUP BY 1"
            counted = {row["run"]: row["n"] for row in session.sql(query).to_pylist()}
            expected = {
                name: alone[name].sql(f"SELECT count(*) AS n FROM {view}").to_pylist()[0]["n"]
                for name in NAMES
                if view in every[name]
            }
            assert counted == {name: n for name, n in expected.items() if n}, view


def test_rows_are_those_of_each_run_alone(store: Store) -> None:
    for view, order in (("samples", "sample_id"), ("tokens", "sample_id, position"), ("train_steps", "step")):
        several = rows(store, ("a", "b"), f"SELECT * FROM {view} ORDER BY run, iteration, {order}")
        alone = [
            {"run": name} | row
            for name in ("a", "b")
            for row in rows(store, (name,), f"SELECT * FROM {view} ORDER BY iteration, {order}")
        ]
        assert repr(several) == repr(alone), view  # repr: NaN is NaN


def test_runs_of_different_flows_are_asked_together(store: Store) -> None:
    query = "SELECT run, count(*) AS n, count(reward) AS judged, count(completion) AS texts FROM samples GROUP BY 1"
    found = {row["run"]: row for row in rows(store, ("a", "tuned"), query)}
    assert found["a"]["judged"] == found["a"]["n"] == found["a"]["texts"] == 32
    assert (found["tuned"]["n"], found["tuned"]["judged"], found["tuned"]["texts"]) == (12, 0, 12)


def test_shared_history_is_each_childs_and_says_who_made_it(store: Store) -> None:
    query = "SELECT run, made_by, iteration FROM commits ORDER BY run, iteration"
    found = [tuple(row.values()) for row in rows(store, ("a", "child"), query)]
    assert found == [("a", "a", 0), ("a", "a", 1), ("child", "a", 0), ("child", "child", 1)]
    alone = rows(store, ("child",), "SELECT run, iteration FROM commits ORDER BY iteration")
    assert alone == [{"run": "a", "iteration": 0}, {"run": "child", "iteration": 1}], "one run's view is what it was"
    for view in ("stages", "segments"):
        assert rows(store, ("a", "child"), f"SELECT DISTINCT run, made_by FROM {view} WHERE run <> made_by") == [
            {"run": "child", "made_by": "a"}
        ]


def test_every_view_of_one_run_has_the_column_run_too(store: Store) -> None:
    with Session(store, "child") as session:
        for view in views_of(store, "child"):
            found = {row["run"] for row in session.sql(f"SELECT DISTINCT run FROM {view}").to_pylist()}
            assert found <= ({"a", "child"} if view in ("stages", "commits", "segments") else {"child"}), view


def test_joins_that_no_column_needs_are_not_made(store: Store) -> None:
    with Session(store, "a", "b") as session:
        session.sql("SELECT run, avg(reward) FROM samples GROUP BY 1")
        assert not any("JOIN" in run.defined["samples"] for run in session.runs)
        session.sql("SELECT run, prompt FROM samples")
        assert all("LEFT JOIN rollout" in run.defined["samples"] for run in session.runs)


def test_a_question_that_cannot_be_answered_names_the_runs_and_their_views(store: Store) -> None:
    with pytest.raises(UserError, match=r"Views of run 'a' and 'tuned': .*batch.*rollout"):
        rows(store, ("a", "tuned"), "SELECT nosuch FROM samples")
    with pytest.raises(UserError, match="no run 'x'"):
        rows(store, ("a", "x"), "SELECT 1")
    with pytest.raises(UserError, match="each once; given: a, a"):
        rows(store, ("a", "a"), "SELECT 1")


def test_a_damaged_shard_of_one_run_is_named(store: Store, tmp_path: Path) -> None:
    copy = open_store(str(tmp_path / "copy"))
    for path in [path for name in ("a", "b") for path in listed(store, name)]:
        copy.create(path, store.read(path))
    run = load_run(copy, "b")
    [shard] = run.read_stage(run.commit(1).stages[2]).tables["rollout"].shards
    damaged = bytearray(copy.read(shard.path))
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "copy" / shard.path).write_bytes(damaged)
    assert rows(copy, ("a", "b"), "SELECT count(*) AS n FROM scalars") == [{"n": 64}]
    with pytest.raises(UserError, match=re.escape(shard.path)):
        rows(copy, ("a", "b"), "SELECT max(completion) FROM rollout")


@pytest.mark.parametrize(
    "query",
    ["SELECT * FROM read_text('{file}')", "SELECT * FROM '{file}'", "COPY (SELECT 1) TO '{file}'", "ATTACH '{file}'"],
)
def test_several_runs_reach_no_file_either(store: Store, tmp_path: Path, query: str) -> None:
    (tmp_path / "secret.csv").write_text("hidden")
    text = query.format(file=tmp_path / "secret.csv")
    with pytest.raises(UserError):
        rows(store, ("a", "b"), text)
    with arealflow.connect("a", "b", store=store.url) as connection, pytest.raises(duckdb.Error):
        connection.execute(text)
    assert (tmp_path / "secret.csv").read_text() == "hidden"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["arealflow", "sql", *words])
    main.app(standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_asks_some_runs_or_all(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT run, count(*) AS n FROM commits GROUP BY 1 ORDER BY 1"
    found = json.loads(asked(monkeypatch, capsys, "a,tuned", query, "--store", store.url, "--json"))
    assert found == [{"run": "a", "n": 2}, {"run": "tuned", "n": 1}]
    for words in ("a, tuned", ",a,tuned,"):
        again = asked(monkeypatch, capsys, words, query, "--store", store.url, "--json")
        assert json.loads(again) == found
    assert json.loads(asked(monkeypatch, capsys, "a,", query, "--store", store.url, "--json")) == found[:1]
    everything = asked(monkeypatch, capsys, "--all", query, "--store", store.url, "--csv")
    assert [row[0] for row in csv.reader(io.StringIO(everything))] == ["run", *NAMES]
    for words in (("--all", "a", query), ("a",)):
        with pytest.raises(UserError, match="Give a run and a query"):
            asked(monkeypatch, capsys, *words, "--store", store.url)
    with pytest.raises(Exception, match="Missing parameter: run"):  # typer's own, which it does not export
        asked(monkeypatch, capsys, "--all", "--store", store.url)


def test_the_commands_of_the_page_are_answered(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().split("## Several runs", 1)[1].split("\n## ", 1)[0]
    first, second = re.findall(r'^arealflow sql [^"]+".*?"$', section, re.DOTALL | re.MULTILINE)
    words = shlex.split(first.replace("mine,other", "a,b"))[2:]
    found = json.loads(asked(monkeypatch, capsys, *words, "--store", store.url, "--json"))
    assert [(row["from_iteration"], row["run"]) for row in found] == [(0, "a"), (0, "b")]
    found = json.loads(asked(monkeypatch, capsys, *shlex.split(second)[2:], "--store", store.url, "--json"))
    assert [(row["run"], row["iterations"]) for row in found] == [("a", 2), ("b", 2), ("child", 1), ("tuned", 1)]


def test_all_runs_are_those_that_can_be_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["arealflow", "sql", "--all", "SELECT DISTINCT run FROM samples", "--json"])
    monkeypatch.setenv("AREALFLOW_STORE", str(tmp_path))
    main.app(standalone_mode=False)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [{"run": "old"}]
    assert printed.err.startswith("left out: run broken: ")
    with pytest.warns(UserWarning, match="left out: run broken: "), arealflow.connect() as connection:
        assert connection.sql("SELECT DISTINCT run FROM samples").fetchall() == [("old",)]


# ── from Python ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_a_notebook_works(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cells of docs/reference/views.md, one after the other, as a notebook runs them."""
    monkeypatch.setenv("AREALFLOW_STORE", store.url)
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(cells) >= 2 and any("arealflow.connect" in cell for cell in cells)
    variables: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell.replace('"mine"', '"a"').replace('"other"', '"b"'), "cell", "exec"), variables)
    assert len(variables["rewards"]) == 2 and variables["rewards"].column_names == ["iteration", "reward"]
    assert {row[0] for row in variables["both"]} == {"a", "b"} and "pandas" not in str(cells)


def test_a_connection_is_duckdbs_own_and_locked(store: Store) -> None:
    with arealflow.connect("a", store=store.url) as connection:
        assert isinstance(connection, duckdb.DuckDBPyConnection)
        assert connection.sql("SELECT count(*) FROM samples WHERE prompt <> ''").fetchall() == [(32,)]
        with pytest.raises(duckdb.Error, match="locked"):
            connection.execute("SET enable_external_access = true")
    with Session(store, "a", several=True) as session:
        assert session.sql("SELECT DISTINCT run FROM samples").to_pylist() == [{"run": "a"}]
    with arealflow.connect(store=store.url) as connection:
        assert [row[0] for row in connection.sql("SELECT DISTINCT run FROM commits ORDER BY 1").fetchall()] == [*NAMES]


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_connection_that_nobody_closes_does_not_stay(store: Store, names: tuple[str, ...]) -> None:
    session = Session(store, *names)
    scanned = weakref.ref(session.runs[0].lazies["scalars"])
    connection = session.connection
    assert connection.sql("SELECT count(*) AS n FROM scalars").fetchall()
    del session, connection
    gc.collect()
    assert scanned() is None
