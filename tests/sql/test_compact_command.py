"""`arealflow compact` as a person uses it, and the made-up rows that the benchmark writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_builders import build, recipe
from typer.testing import CliRunner

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.catalog import valid_compactions
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session, run_sql
from areal_tasks.store.shards import write_table
from benchmarks.scale import SCALAR, ask_naive, same
from benchmarks.scale_rows import iteration_tables
from benchmarks.scale_run import write_naive, write_run
from flows.cli.main import app
from schemas.errors import UserError

RUNNER = CliRunner()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def test_it_says_what_it_merged(local: Store) -> None:
    run = open_run(local, "run", recipe())
    build(run, range(3))
    done = RUNNER.invoke(app, ["compact", "run", "--store", local.url, "--json"])
    rows = {row["table"]: row for row in json.loads(done.stdout)}
    assert (rows["scalars"]["rows"], rows["scalars"]["files"], rows["commits"]["rows"]) == (48, 1, 3)
    assert "rollout" not in rows and [(c.first, c.stop) for c in valid_compactions(run)] == [(0, 3)]


def test_all_merges_every_table(local: Store) -> None:
    run = open_run(local, "run", recipe())
    build(run, range(2))
    assert RUNNER.invoke(app, ["compact", "run", "--all", "--store", local.url]).exit_code == 0
    before = run_sql(local, "run", "SELECT count(*) AS n, sum(logprob) AS s FROM tokens").to_pylist()
    for shard in Path(local.uri("run")).rglob("stage=*/attempt=*/*.parquet"):
        shard.unlink()
    assert run_sql(local, "run", "SELECT count(*) AS n, sum(logprob) AS s FROM tokens").to_pylist() == before


def test_an_empty_run_is_a_message(local: Store) -> None:
    open_run(local, "run", recipe())
    failed = RUNNER.invoke(app, ["compact", "run", "--store", local.url])
    assert isinstance(failed.exception, UserError) and "no committed iteration" in str(failed.exception)


def test_made_up_rows_are_rows_of_a_run(local: Store) -> None:
    tables = iteration_tables(3, 64, with_tokens=True)
    refs = [write_table(local, f"x/{name}", name, rows) for given in tables.values() for name, rows in given.items()]
    assert {ref.name for ref in refs} >= {"rollout", "verify", "advantage", "scalars", "train_steps"}
    rollout, scalars = tables["rollout"]["rollout"], tables["scalars"]["scalars"]
    assert all(rollout[name].equals(scalars[name]) for name in ("sample_id", "num_tokens", "server", "seed"))
    groups = rollout.group_by("group_id").aggregate([("prompt", "count_distinct"), ("sample_id", "count")])
    assert set(groups["prompt_count_distinct"].to_pylist()) == {1} and set(groups["sample_id_count"].to_pylist()) == {8}


def test_the_naive_layout_gives_the_same_answers(tmp_path: Path, local: Store) -> None:
    write_run(local.url, "scale", 3, 64, 1)
    write_naive(tmp_path / "naive", 3, 64)
    with Session(local, "scale") as session:
        for name, query in SCALAR.items():
            assert same(session.sql(query), ask_naive(tmp_path / "naive", query)), name
