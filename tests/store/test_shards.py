"""Tables on disk and on S3: what is refused, what comes back, how it is laid out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_builders import table
from store_listing import listed

from areal_tasks.store.backend import Missing, Store, StoreError
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.shards import content_digest, encode, read_table, write_table
from schemas.tables import TABLES

PREFIX = "run/iteration=000000/stage=s/attempt=a"


def fresh() -> str:
    return f"run/attempt={new_attempt()}"


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_comes_back_as_it_was(local_store: Store, name: str) -> None:
    rows = table(name)
    ref = write_table(local_store, fresh(), name, rows)
    assert read_table(local_store, ref).equals(rows)
    assert (ref.rows, ref.digest) == (rows.num_rows, content_digest(rows))


def test_shards_of_a_large_table_stay_in_order(store: Store) -> None:
    rows = table("rollout", rows=50)
    ref = write_table(store, PREFIX, "rollout", rows, max_rows=7)
    assert [shard.rows for shard in ref.shards] == [7] * 7 + [1]
    assert ref.shards[3].path == f"{PREFIX}/rollout-00003.parquet"
    assert ref.tokens == 200 and ref.shards[0].bytes == store.size(ref.shards[0].path)
    assert read_table(store, ref).equals(rows)
    assert ref.digest == write_table(store, fresh(), "rollout", rows).digest


def test_only_the_columns_asked_for_in_their_order(local_store: Store) -> None:
    rows = table("rollout")
    ref = write_table(local_store, fresh(), "rollout", rows)
    wanted = ("num_tokens", "sample_id", "logprobs")
    assert read_table(local_store, ref, wanted).equals(rows.select(list(wanted)))


def test_a_table_without_rows_comes_back(local_store: Store) -> None:
    rows = table("rollout").slice(0, 0)
    ref = write_table(local_store, fresh(), "rollout", rows)
    assert read_table(local_store, ref).equals(rows) and ref.rows == ref.tokens == 0


def test_floats_that_are_not_finite_come_back(local_store: Store) -> None:
    rows = table("reference", rows=1, tokens=3)
    values = pa.array([[float("nan"), float("inf"), -0.0]], pa.list_(pa.float32()))
    rows = rows.set_column(1, rows.schema.field(1), values)
    ref = write_table(local_store, fresh(), "reference", rows)
    assert content_digest(read_table(local_store, ref)) == content_digest(rows)


def replaced(column: str, values: list[object]) -> pa.Table:
    rows = table("rollout", rows=2, tokens=3)
    field = rows.schema.field(column)
    return rows.set_column(rows.schema.get_field_index(column), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        (table("rollout").drop_columns(["seed"]), "seed .*is missing"),
        (table("rollout").append_column("extra", pa.array([0] * 16)), "extra is unknown"),
        (table("rollout").select(sorted(TABLES["rollout"].names)), "another order"),
        (table("verify").cast(pa.schema([pa.field(f.name, f.type) for f in TABLES["verify"]])), "not null"),
        (replaced("seed", [1, None]), "'seed': 1 nulls"),
        (replaced("logprobs", [[0.0, None, 0.0], [0.0] * 3]), "'logprobs': a list holds nulls"),
        (replaced("logprobs", [[0.0] * 3, [0.0] * 2]), "'logprobs': its lists are not num_tokens long"),
    ],
    ids=["missing", "unknown", "order", "nullable", "null", "null-in-list", "length"],
)
def test_a_table_that_violates_its_schema_is_refused(local_store: Store, rows: pa.Table, cause: str) -> None:
    name = "verify" if "verdict" in rows.column_names else "rollout"
    with pytest.raises(ValueError, match=cause):
        write_table(local_store, PREFIX, name, rows)
    assert listed(local_store, "run") == []


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: b""], ids=["bit", "cut", "empty"])
def test_a_damaged_shard_is_named(local_store: Store, damage: Callable[[bytes], bytes]) -> None:
    ref = write_table(local_store, PREFIX, "rollout", table("rollout", rows=30), max_rows=10)
    path = Path(local_store.uri(ref.shards[1].path))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"rollout-00001\.parquet is damaged.*Restore this file"):
        read_table(local_store, ref)
    path.unlink()
    with pytest.raises(Missing, match=r"rollout-00001\.parquet does not exist"):
        read_table(local_store, ref)


def test_how_a_file_is_laid_out() -> None:
    metadata = pq.ParquetFile(pa.BufferReader(encode(table("rollout", rows=2500)))).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1024, 1024, 452]
    columns = {c.path_in_schema: c for c in map(metadata.row_group(0).column, range(metadata.num_columns))}
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["logprobs.list.element"].encodings
    assert columns["num_tokens"].statistics.max == 4  # what a reader skips row groups by
