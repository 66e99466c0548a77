"""SQL over a run: what it shows, what it refuses, and that it opens only what it needs."""

from __future__ import annotations

import math
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from store_builders import STAGES, build, commit_stage, iteration_commit, manifest, recipe, table

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import Origin
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session, run_sql, without_nan
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.tables import TABLES

ROWS = 16


def built(store: Store, iterations: int = 3, stages: dict[str, tuple[str, ...]] = STAGES) -> Run:
    run = open_run(store, "run", recipe())
    build(run, range(iterations), stages)
    return run


def ask(store: Store, query: str) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in run_sql(store, "run", query).to_pylist()]


def test_every_table_is_a_view_with_the_iteration(store: Store) -> None:
    built(store)
    for name in ("rollout", "verify", "advantage", "train_steps", "train_samples", "scalars"):
        assert ask(store, f"SELECT iteration, count(*) FROM {name} GROUP BY ALL ORDER BY 1") == [
            (k, ROWS) for k in range(3)
        ]
        columns = {row[0] for row in ask(store, f"DESCRIBE {name}")}
        assert columns == {"run", "iteration", *TABLES[name].names}


def test_rows_are_those_that_were_written(store: Store) -> None:
    built(store)
    there = run_sql(store, "run", "SELECT * EXCLUDE (run, iteration) FROM rollout WHERE iteration = 1")
    assert there.cast(TABLES["rollout"]).equals(table("rollout", iteration=1))


def test_samples_joins_scalars_and_texts(store: Store) -> None:
    built(store)
    rows = ask(store, "SELECT sample_id, reward, kept, completion, parsed FROM samples WHERE iteration = 2")
    scalars, rollout, verify = (table(name, iteration=2) for name in ("scalars", "rollout", "verify"))
    columns = [scalars["sample_id"], scalars["reward"], scalars["kept"], rollout["completion"], verify["parsed"]]
    expected = list(zip(*(column.to_pylist() for column in columns), strict=True))
    assert sorted(rows) == sorted(expected)


def test_tables_from_before_a_column_are_read_beside_those_that_have_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = {"train_steps": "logprob_gap_mean", "train_samples": "sample_logprob_gap", "scalars": "sample_logprob_gap"}
    added["rollout"] = "stale_kv"
    removed = {*added.values(), "peak_bytes"}
    run = open_run(store, "run", recipe())
    with monkeypatch.context() as patch:
        for name in added:
            patch.setitem(TABLES, name, pa.schema([f for f in TABLES[name] if f.name not in removed]))
        build(run, [0])
    build(run, [1])
    gaps = table("train_steps", iteration=1)["logprob_gap_mean"].to_pylist()
    found = ask(store, "SELECT iteration, count(*), count(logprob_gap_mean) FROM train_steps GROUP BY 1 ORDER BY 1")
    assert found == [(0, ROWS, 0), (1, ROWS, ROWS)]
    assert ask(store, "SELECT max(logprob_gap_mean) FROM train_steps") == [(max(gaps),)]
    peaks = ask(store, "SELECT iteration, count(peak_bytes) FROM train_steps GROUP BY 1 ORDER BY 1")
    assert peaks == [(0, 0), (1, ROWS)]
    train = next(ref for ref in run.commit(0).stages if ref.stage == "train")
    old = read_table(store, run.read_manifest(train.path).tables["train_steps"], ("step", "peak_bytes"))
    assert old.schema.field("peak_bytes").type == pa.list_(pa.int64()) and old["peak_bytes"].null_count == ROWS
    query = "SELECT iteration, count(*), count(sample_logprob_gap) FROM samples GROUP BY 1 ORDER BY 1"
    assert ask(store, query) == [(0, ROWS, 0), (1, ROWS, ROWS)]
    assert ask(store, "SELECT count(*) FROM tokens WHERE stale_kv IS NULL") == [(0,)]


def test_a_gap_that_nobody_measured_does_not_spoil_the_mean_of_the_others(local_store: Store) -> None:
    run = open_run(local_store, "run", recipe())
    rows = table("scalars")
    at = rows.schema.get_field_index("sample_logprob_gap")
    gaps = pa.array([math.nan, 0.5, *[0.25] * (ROWS - 2)], pa.float32())
    made = {"rollout": table("rollout"), "scalars": rows.set_column(at, rows.schema.field(at), gaps)}
    refs = [commit_stage(local_store, manifest(local_store, "run", 0, name, {name: t})) for name, t in made.items()]
    run.commit_iteration(iteration_commit(run, 0, refs))
    [(known, mean)] = ask(local_store, "SELECT count(sample_logprob_gap), avg(sample_logprob_gap) FROM samples")
    assert known == ROWS - 1 and mean == (0.5 + 0.25 * (ROWS - 2)) / (ROWS - 1)


def test_tokens_has_a_row_for_every_token(store: Store) -> None:
    built(store)
    rollout, advantage = table("rollout", iteration=1), table("advantage", iteration=1)
    rows = ask(
        store,
        "SELECT sample_id, position, token_id, logprob, version, loss_mask, advantage FROM tokens WHERE iteration = 1",
    )
    lists = [rollout[name].to_pylist() for name in ("input_ids", "logprobs", "versions", "loss_mask")]
    lists.append(advantage["advantages"].to_pylist())
    ids = rollout["sample_id"].to_pylist()
    expected = [(s, i, *(x[n][i] for x in lists)) for n, s in enumerate(ids) for i in range(len(lists[0][n]))]
    assert sorted(rows) == sorted(expected) and len(rows) == 4 * ROWS


def test_the_lag_of_a_sample_and_of_its_tokens(store: Store) -> None:
    built(store)
    rollout, scalars = (table(name, iteration=2).to_pylist() for name in ("rollout", "scalars"))
    known = [2 - v for row in rollout for v, own in zip(row["versions"], row["loss_mask"], strict=True) if own]
    tokens = ask(store, "SELECT loss_mask, lag FROM tokens WHERE iteration = 2")
    assert sorted(lag for own, lag in tokens if own) == sorted(known)  # type: ignore[type-var]
    assert all(lag is None for own, lag in tokens if not own)
    lags = {row["sample_id"]: 2 - row["version_min"] if row["num_generated"] else None for row in scalars}
    assert dict(ask(store, "SELECT sample_id, lag FROM samples WHERE iteration = 2")) == lags  # type: ignore[comparison-overlap]


def test_stages_and_commits_say_what_was_made_and_by_whom(store: Store) -> None:
    run = built(store)
    stages = run_sql(store, "run", "SELECT * FROM stages WHERE stage = 'train' ORDER BY iteration").to_pylist()
    made = run.read_stage(run.commit(0).stages[3])
    assert [row["iteration"] for row in stages] == [0, 1, 2]
    first = stages[0]
    assert (first["rows"], first["shards"], first["tables"]) == (2 * ROWS, 2, ["train_steps", "train_samples"])
    assert first["bytes"] == sum(s.bytes for t in made.tables.values() for s in t.shards)
    assert first["attempt"] == made.attempt and dict(first["metrics"]) == made.metrics and not first["reused"]
    commits = run_sql(store, "run", "SELECT iteration, version, owner, seconds FROM commits ORDER BY 1").to_pylist()
    assert [(c["iteration"], c["version"], c["owner"]) for c in commits] == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert all(c["seconds"] >= 0 for c in commits)


def test_what_a_later_start_found_committed_is_marked_reused(local_store: Store) -> None:
    built(local_store, 1)
    later = open_run(local_store, "run", recipe())  # owner 2; the builders' manifests are owner 1's
    build(later, [1], {"verify": ("verify",)})
    assert ask(local_store, "SELECT reused FROM stages WHERE stage = 'verify' ORDER BY iteration") == [
        (False,),
        (True,),
    ]


def test_only_what_a_commit_selects_is_visible(store: Store) -> None:
    run = built(store, 2)
    commit_stage(store, manifest(store, "run", 2, "rollout", {"rollout": table("rollout", iteration=2)}))
    manifest(store, "run", 1, "rollout", {"rollout": table("rollout", iteration=1, seed=9)})  # an orphan
    commit_stage(store, manifest(store, "run", 1, "rollout", {"rollout": table("rollout", seed=8)}, key="another"))
    assert ask(store, "SELECT count(*), max(iteration) FROM rollout") == [(2 * ROWS, 1)]
    assert run_sql(store, "run", "SELECT * FROM stages WHERE stage = 'rollout'").num_rows == 2
    assert run.head() is not None


def test_a_run_without_commits_has_views_without_rows(local_store: Store) -> None:
    open_run(local_store, "run", recipe())
    assert ask(local_store, "SELECT count(*) FROM commits") == ask(local_store, "SELECT count(*) FROM stages") == [(0,)]


def test_a_query_opens_only_the_iterations_it_needs(local_store: Store) -> None:
    run = built(local_store)
    shard = run.read_stage(run.commit(2).stages[0]).tables["rollout"].shards[0]
    path = Path(local_store.uri(shard.path))
    path.write_bytes(b"PAR1" + b"x" * 50 + b"PAR1")
    assert ask(local_store, "SELECT count(*) FROM rollout WHERE iteration < 2 AND num_tokens > 0") == [(2 * ROWS,)]
    with pytest.raises(UserError, match="rollout-00000"):
        ask(local_store, "SELECT sum(num_tokens) FROM rollout")
    path.unlink()
    with pytest.raises(UserError, match="rollout-00000"):
        ask(local_store, "SELECT sum(num_tokens) FROM rollout")


def test_a_query_reads_only_the_manifests_it_needs(local_store: Store) -> None:
    run = built(local_store)
    damaged = Path(local_store.uri(run.commit(1).stages[0].path))
    damaged.write_bytes(b"{}")
    assert ask(local_store, "SELECT count(*) FROM scalars") == [(3 * ROWS,)]
    with pytest.raises(UserError, match=rf"{damaged.name} is damaged"):
        ask(local_store, "SELECT count(*) FROM rollout")


@pytest.mark.parametrize(
    ("query", "cause"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM scalars", 'column "nothing" not found'),
        ("SELECT * FROM reference", "reference does not exist"),
        ("SELECT reward + 'x' FROM scalars", "convert string 'x'"),
        ("", "single SELECT"),
        ("SELECT 1; SELECT 2", "single SELECT"),
        ("CREATE TABLE x AS SELECT 1", "single SELECT"),
        ("DROP VIEW samples", "single SELECT"),
        ("SET enable_external_access = true", "single SELECT"),
        ("INSTALL httpfs", "single SELECT"),
        ("WITH x AS (SELECT 1) INSERT INTO scalars SELECT * FROM x", "single SELECT"),
    ],
)
def test_sql_with_an_error_is_explained(local_store: Store, query: str, cause: str) -> None:
    built(local_store, 1)
    with pytest.raises(UserError, match=cause) as error:
        ask(local_store, query)
    if "single SELECT" not in cause and "syntax" not in cause:
        views = "advantage, commits, groups, log, rollout, samples, scalars, segments, servers, shards, spool, stages"
        assert f"Views of run 'run': {views}, starts, system, tokens" in str(error.value)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM sniff_csv('{file}')",
        "SELECT * FROM read_parquet('{folder}/**/*.parquet')",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{folder}/new''')",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/new'",
        "COPY (SELECT 1) TO '{folder}/new'",
        "ATTACH '{folder}/new'",
    ],
)
def test_sql_reaches_no_file(local_store: Store, tmp_path: Path, query: str) -> None:
    built(local_store, 1)
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError):
        ask(local_store, query.format(file=tmp_path / "secret.csv", folder=tmp_path))
    assert not (tmp_path / "new").exists()


def test_sql_sees_no_python_variables(local_store: Store) -> None:
    built(local_store, 1)
    secret = table("verify")
    assert secret.num_rows
    with pytest.raises(UserError, match="secret does not exist"):
        ask(local_store, "SELECT * FROM secret")


def test_a_connection_has_every_view_and_stays_locked(local_store: Store) -> None:
    built(local_store, 1)
    with Session(local_store, "run") as session:
        connection = session.ask(lambda connection: connection)
        names = {row[0] for row in connection.execute("SHOW TABLES").fetchall()}
        assert {"samples", "tokens", "stages", "commits", "rollout", "scalars"} <= names
        assert connection.execute("SELECT count(*) FROM samples JOIN tokens USING (sample_id)").fetchall() == [(64,)]
        for attempt in ("SET enable_external_access = true", "SET threads = 1", "INSTALL httpfs"):
            with pytest.raises(Exception, match=r"locked|disabled|cannot|Cannot"):
                connection.execute(attempt)


def test_supervised_runs_have_samples_and_tokens_too(local_store: Store) -> None:
    built(local_store, 2, {"batch": ("batch",), "train": ("train_steps", "train_samples")})
    assert ask(local_store, "SELECT count(*), count(sample_loss), count(prompt) FROM samples") == [(32, 32, 32)]
    assert ask(local_store, "SELECT count(*), max(position) FROM tokens") == [(128, 3)]


def test_evaluations_have_samples_too(local_store: Store) -> None:
    built(local_store, 1, {"evaluate": ("evaluate",)})
    assert ask(local_store, "SELECT count(*), count(reward), count(completion) FROM samples") == [(16, 16, 16)]


def test_reference_logprobs_are_tokens_columns_where_there_are_any(local_store: Store) -> None:
    built(local_store, 1, STAGES | {"reference": ("reference",)})
    expected = [value for row in table("reference")["ref_logprobs"].to_pylist() for value in row]
    assert sorted(row[0] for row in ask(local_store, "SELECT ref_logprob FROM tokens")) == sorted(expected)  # type: ignore[type-var]


def test_what_is_carried_from_iteration_to_iteration_is_there_once(local_store: Store) -> None:
    run = open_run(local_store, "run", recipe())
    once = commit_stage(local_store, manifest(local_store, "run", 0, "prompts", {"prompts": table("prompts")}))
    for k in range(3):
        run.commit_iteration(iteration_commit(run, k, [once]))
    assert ask(local_store, "SELECT count(*), max(iteration) FROM prompts") == [(ROWS, 0)]
    assert ask(local_store, "SELECT count(*) FROM stages") == [(1,)]


def test_a_fork_sees_its_parents_iterations(local_store: Store) -> None:
    built(local_store, 3)
    child = open_run(local_store, "child", recipe(), origin=Origin("run", 2))
    build(child, [2], STAGES)
    rows = run_sql(local_store, "child", "SELECT iteration, run FROM stages WHERE stage = 'rollout' ORDER BY 1")
    assert rows.to_pylist() == [{"iteration": k, "run": name} for k, name in enumerate(["run", "run", "child"])]
    assert run_sql(local_store, "child", "SELECT count(*) AS n FROM rollout").to_pylist() == [{"n": 3 * ROWS}]


def test_nan_is_null_whatever_the_name_of_its_column() -> None:
    """Also one that SQL would take for a word of its own."""
    names = ["order", "Mixed Name", 'a"b']
    rows = duckdb.connect().from_arrow(pa.table({name: [1.0, math.nan] for name in names}))
    assert without_nan(rows).fetchall() == [(1.0,) * 3, (None,) * 3]


def test_columns_of_one_name_are_all_in_an_answer(local_store: Store) -> None:
    built(local_store)
    answer = run_sql(local_store, "run", "SELECT 1 AS x, 2 AS x_1, 3 AS x, 4 AS x FROM scalars LIMIT 1")
    assert answer.to_pylist() == [{"x": 1, "x_1": 2, "x_2": 3, "x_3": 4}]
    with Session(local_store, "run") as session:
        assert session.rows("SELECT 1 AS x, 2 AS x") == [{"x": 1, "x_1": 2}]
