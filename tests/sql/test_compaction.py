"""Compactions: the same answers from fewer files, and none from a damaged or foreign one."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import STAGES, commit_stage, iteration_commit, manifest, recipe, table

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.catalog import DERIVED, Catalog, list_compactions, valid_compactions
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.objects import inventory
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session, run_sql
from areal_tasks.store.retention.compact import Compactor, compact, compact_all, regions_to_merge
from areal_tasks.store.runs import Run, load_run
from schemas.compaction import SCALAR_TABLES, Compaction
from schemas.tables import TABLES

ROWS = 16
EVERYTHING = tuple(name for names in STAGES.values() for name in names)
VIEWS = (*EVERYTHING, "prompts", "stages", "commits", "shards", "samples", "tokens", "groups", "servers")
QUESTIONS = (
    "SELECT iteration, avg(reward), count(*) FROM samples WHERE iteration BETWEEN 2 AND 5 GROUP BY 1 ORDER BY 1",
    "SELECT prompt, avg(reward) FROM samples WHERE num_generated > 500 GROUP BY 1 ORDER BY 1",
    "SELECT count(*) FROM scalars WHERE reward > 300 OR iteration IN (1, 6)",
    "SELECT verdict, sum(num_generated) FROM scalars WHERE iteration > 2 AND server <> 'text 3 é' GROUP BY 1",
    "SELECT count(*) FROM train_steps WHERE NOT isnan(logprob_gap_mean) AND iteration <> 3",
    "SELECT stage, sum(bytes) FROM stages WHERE 'scalars' IN tables GROUP BY 1",
)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def more(run: Run, iterations: int) -> None:
    """Commit further iterations; all of them select the prompts of the first."""
    head = run.head()
    first = 0 if head is None else head.iteration + 1
    for k in range(first, first + iterations):
        tables = {s: {n: table(n, ROWS, iteration=k) for n in names} for s, names in STAGES.items()}
        made = [commit_stage(run.store, manifest(run.store, run.name, k, s, given)) for s, given in tables.items()]
        run.commit_iteration(iteration_commit(run, k, [*_prompts(run, k), *made]))


def _prompts(run: Run, k: int) -> list[object]:
    if k:
        return [ref for ref in run.commit(k - 1).stages if ref.stage == "prompts"]
    return [commit_stage(run.store, manifest(run.store, run.name, 0, "prompts", {"prompts": table("prompts")}))]


def begun(store: Store, iterations: int, name: str = "run") -> Run:
    run = open_run(store, name, recipe())
    more(run, iterations)
    return run


def compact_end(run: Run, every: int = 1) -> Compaction | None:
    """What the loop does after a commit."""
    catalog = Catalog(run)
    regions = regions_to_merge(catalog.regions, every)
    return compact(catalog, regions) if regions else None


def answers(store: Store, run: str, plain: bool) -> list[list[str]]:
    """What every view holds and what the questions say, rows in any order; as text, since NaN is not NaN."""
    with Session(store, run, compacted=not plain) as session:
        tables = [session.sql(query) for query in (*(f"SELECT * FROM {view}" for view in VIEWS), *QUESTIONS)]
    return [[str(table.schema), *sorted(repr(row) for row in table.to_pylist())] for table in tables]


def check_same(store: Store, run: str = "run") -> None:
    for with_compaction, without in zip(answers(store, run, False), answers(store, run, True), strict=True):
        assert with_compaction == without


def covered(run: Run) -> list[tuple[int, int]]:
    return [(c.first, c.stop) for c in valid_compactions(load_run(run.store, run.name))]


# ── the same answers ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["no", "end", "all", "everything"])), min_size=1, max_size=4)
)
def test_answers_are_the_same_with_and_without(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("same")
    run = begun(open_store((folder / "store").as_uri()), 0)
    for iterations, how in steps:
        more(run, iterations)
        if how == "end":
            compact_end(run)
        elif how != "no":
            compact_all(run, EVERYTHING if how == "everything" else SCALAR_TABLES)
    check_same(run.store)
    shutil.rmtree(folder)


def test_the_same_on_s3(s3_store: Store) -> None:
    run = begun(s3_store, 3, "compact-s3")
    compact_end(run)
    more(run, 1)
    assert covered(run) == [(0, 3)]
    check_same(s3_store, "compact-s3")


def test_a_child_uses_its_parents_compactions_before_the_fork_and_its_own(local: Store) -> None:
    parent = begun(local, 2)
    compact_end(parent)
    more(parent, 2)
    compact_all(parent)
    child = open_run(local, "child", recipe(), origin=Origin("run", 3))
    more(child, 2)
    assert covered(child) == [(0, 2)]  # the other one knows an iteration that the child has not
    check_same(local, "child")
    compact_end(child)
    assert covered(child) == [(0, 5)]
    check_same(local, "child")
    assert covered(parent) == [(0, 4)]


def test_tables_from_before_a_column_have_nulls_in_it(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(local, 0)
    with monkeypatch.context() as patch:
        for name in ("train_samples", "scalars"):
            patch.setitem(TABLES, name, pa.schema([f for f in TABLES[name] if f.name != "sample_logprob_gap"]))
        more(run, 1)
    more(run, 1)
    compact_end(run)
    assert covered(run) == [(0, 2)]
    found = run_sql(local, "run", "SELECT iteration, count(sample_logprob_gap) AS n FROM samples GROUP BY 1 ORDER BY 1")
    assert found["n"].to_pylist() == [0, ROWS]
    check_same(local)


def test_a_compaction_from_before_a_column_is_passed_over_for_that_table(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(local, 2)
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "scalars", pa.schema([f for f in TABLES["scalars"] if f.name != "turns"]))
        patch.setitem(DERIVED, "commits", pa.schema([f for f in DERIVED["commits"] if f.name != "owner"]))
        compact_all(run)
    assert covered(run) == [(0, 2)]
    check_same(local)


# ── fewer files ─────────────────────────────────────────────────────────────────────────────────────────────────────


def reads(monkeypatch: pytest.MonkeyPatch, store: Store, query: str) -> list[str]:
    """The JSON records that a question reads."""
    seen: list[str] = []
    read = LocalBackend.read
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "read", lambda self, path: (seen.append(path), read(self, path))[1])
        run_sql(store, "run", query)
    return [path for path in seen if "iteration=" in path and path.endswith(".json")]


def test_a_question_reads_no_commits_and_manifests_that_are_compacted(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(local, 12)
    queries = ["SELECT avg(reward) FROM samples", "SELECT count(*) FROM stages", "SELECT sum(num_tokens) FROM rollout"]
    before = [len(reads(monkeypatch, local, query)) for query in queries]
    compact_end(run)
    after = [len(set(reads(monkeypatch, local, query))) for query in queries]
    assert min(before) >= 24 and after == [1, 1, 1]


def test_a_scalar_question_opens_no_shard_that_is_compacted(local: Store) -> None:
    run = begun(local, 3)
    compact_end(run)
    for shard in Path(local.uri("run")).rglob("stage=*/attempt=*/*.parquet"):
        shard.unlink()
    assert run_sql(local, "run", "SELECT count(reward) AS n FROM samples").to_pylist() == [{"n": 3 * ROWS}]


def test_there_are_few_compactions_however_long_the_run(local: Store) -> None:
    run, numbers = begun(local, 0), []
    for _ in range(16):
        more(run, 1)
        compact_end(run)
        numbers.append(len(covered(run)))
    assert max(numbers) <= 4 and covered(run)[0][0] == 0 and covered(run)[-1][1] == 16


def test_nothing_is_due_before_enough_iterations(local: Store) -> None:
    run = begun(local, 3)
    assert compact_end(run, every=4) is None
    more(run, 1)
    made = compact_end(run, every=4)
    assert made is not None and (made.first, made.stop) == (0, 4)
    assert compact_end(run, every=1) is None


def test_a_compaction_of_every_table_is_not_merged_away(local: Store) -> None:
    run = begun(local, 2)
    compact_all(run, EVERYTHING)
    more(run, 4)
    compact_end(run)
    assert covered(run) == [(0, 2), (2, 6)]


# ── concurrent with the loop ────────────────────────────────────────────────────────────────────────────────────────


def test_the_loop_compacts_beside_its_commits(local: Store) -> None:
    run = begun(local, 0)
    with Compactor(run, 2) as compactor:
        for _ in range(5):
            more(run, 1)
            compactor.committed()
            if compactor.thread is not None:
                compactor.thread.join()
    assert covered(run)[-1][1] >= 4


def test_zero_means_never(local: Store) -> None:
    run = begun(local, 2)
    with Compactor(run, 0) as compactor:
        compactor.committed()
    assert compactor.thread is None and covered(run) == []


def test_a_failure_is_logged_and_changes_nothing(
    local: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(local, 2)

    def full(self: LocalBackend, path: str, data: bytes) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch, Compactor(run, 2) as compactor:
        patch.setattr(LocalBackend, "put", full)
        compactor.committed()
        assert compactor.thread is not None
        compactor.thread.join()
    assert "could not be compacted" in caplog.text and "the disk is full" in caplog.text
    assert covered(run) == []
    check_same(local)


# ── damaged and foreign ones ────────────────────────────────────────────────────────────────────────────────────────


def only(run: Run) -> Path:
    """The manifest of the run's one compaction."""
    [name] = list_compactions(run.store, run.name)
    return Path(run.store.uri(name.path))


@pytest.mark.parametrize("whole_bytes", [1 << 20, 0], ids=["small", "large"])
def test_no_altered_byte_of_a_merged_file_changes_an_answer(
    local: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """In a large file, headers of pages have bytes whose change alters nothing."""
    run = begun(local, 2)
    made = compact_all(run)
    monkeypatch.setattr(inventory, "WHOLE_BYTES", whole_bytes)
    [file] = made.tables["scalars"].files
    path = Path(local.uri(file.path))
    whole = path.read_bytes()
    expected = run_sql(local, "run", "SELECT * FROM scalars")
    noticed = []
    for at in [*range(0, len(whole), 997), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert repr(run_sql(local, "run", "SELECT * FROM scalars").to_pylist()) == repr(expected.to_pylist())
        noticed.append("is damaged" in caplog.text and "arealflow compact run" in caplog.text)
    assert all(noticed) if whole_bytes else sum(noticed) > len(noticed) * 3 / 4
    path.write_bytes(whole[:-9])
    assert run_sql(local, "run", "SELECT * FROM scalars").num_rows == 2 * ROWS
    path.unlink()
    assert run_sql(local, "run", "SELECT * FROM scalars").num_rows == 2 * ROWS


@pytest.mark.parametrize("column", ["reward", "iteration", "verdict"])
def test_a_damaged_header_of_a_page_of_a_large_file_hides_no_row(
    local: Store, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """No checksum covers these headers, and Arrow skips a page of a type that it does not know."""
    run = begun(local, 2)
    monkeypatch.setattr(inventory, "WHOLE_BYTES", 0)
    [file] = compact_all(run).tables["scalars"].files
    path = Path(local.uri(file.path))
    whole = path.read_bytes()
    query = f"SELECT {column} FROM scalars"
    expected = run_sql(local, "run", query).num_rows
    for at in headers(path, column):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert run_sql(local, "run", query).num_rows == expected == 2 * ROWS, (at, bit)


def headers(path: Path, column: str) -> Iterator[int]:
    """The first bytes of the headers of a column's pages: in each, the page's type is the second byte."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    [chunk] = [part for part in map(group.column, range(group.num_columns)) if part.path_in_schema == column]
    for start in (chunk.dictionary_page_offset, chunk.data_page_offset):
        yield from range(start, start + 3) if start is not None else ()


def damaged_copies(store: Store) -> list[str]:
    """The files of compactions that an audit reports."""
    return [Path(d.path).name for d in audit(store, "run").defects if d.path.startswith(paths.compactions("run"))]


@pytest.mark.parametrize("whole_bytes", [1 << 20, 0], ids=["small", "large"])
def test_a_compaction_of_an_earlier_version_is_used(
    local: Store, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """Its record has digests of parts of its files, which have no checksums of their own."""
    run = begun(local, 3)
    made = compact_all(run)
    record = json.loads(made.encode(""))
    del record["seal"]
    for file in (file for merged in record["tables"].values() for file in merged["files"]):
        path = Path(local.uri(file["path"]))
        pq.write_table(pq.read_table(path), path)
        data = path.read_bytes()
        file |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        file |= {"footer": 8, "footer_sha256": "0" * 64, "chunks": [["0" * 32]]}
    body = json.dumps(record, indent=1).encode()
    earlier = paths.compaction("run", 0, 3, 1, "0" * 32)
    seal = hashlib.sha256(f"{earlier}\n".encode() + body).hexdigest()
    only(run).unlink()
    local.create(earlier, f'{{\n "seal": "{seal}",\n'.encode() + body[2:])
    monkeypatch.setattr(inventory, "WHOLE_BYTES", whole_bytes)
    assert covered(run) == [(0, 3)] and damaged_copies(local) == []
    check_same(local)
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    assert damaged_copies(local) == [path.name]
    check_same(local)


def test_damaged_lists_of_commits_and_shards_are_not_believed(local: Store) -> None:
    run = begun(local, 3)
    made = compact_all(run)
    for name in ("commits", "stages", "shards"):
        for file in made.tables[name].files:
            path = Path(local.uri(file.path))
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 4
            path.write_bytes(data)
    check_same(local)


def test_an_altered_manifest_is_not_believed(local: Store) -> None:
    run = begun(local, 2)
    compact_all(run)
    path = only(run)
    whole = path.read_bytes()
    for at in range(0, len(whole), 211):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert covered(run) == []
    check_same(local)


def test_a_compaction_of_another_run_is_not_believed(local: Store) -> None:
    run, other = begun(local, 2), begun(local, 2, "other")
    compact_all(other)
    folder = Path(local.uri(paths.compactions("run")))
    shutil.copytree(Path(local.uri(paths.compactions("other"))), folder)
    assert covered(run) == []
    check_same(local)


def test_a_compaction_of_more_than_the_run_has_is_not_believed(local: Store) -> None:
    run = begun(local, 3)
    compact_all(run)
    Path(local.uri(paths.iteration_commit("run", 2))).unlink()
    assert covered(run) == []
    assert run_sql(local, "run", "SELECT count(*) AS n FROM commits").to_pylist() == [{"n": 2}]


def test_damaged_sources_are_not_merged(local: Store) -> None:
    run = begun(local, 2)
    shard = run.read_stage(next(r for r in run.commit(1).stages if r.stage == "scalars")).tables["scalars"].shards[0]
    path = Path(local.uri(shard.path))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"scalars-00000\.parquet is damaged"):
        compact_all(run)
    assert covered(run) == []


def test_a_damaged_compaction_is_made_anew(local: Store) -> None:
    run = begun(local, 4)
    made = compact_all(run)
    path = Path(local.uri(made.tables["scalars"].files[0].path))
    path.write_bytes(b"x" * path.stat().st_size)
    again = compact_all(run)
    assert valid_compactions(run) == [again]
    assert again.tables["scalars"].files[0].sha256 == made.tables["scalars"].files[0].sha256
    check_same(local)
