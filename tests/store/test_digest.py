"""Content digests: what a table says, and nothing about how it is stored or who served it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import table

from areal_tasks.store.shards import content_digest, encode
from schemas.tables import TABLES, VOLATILE

ROWS = 12
NAMES = sorted(TABLES)


def cut(whole: pa.Table, cuts: list[int]) -> pa.Table:
    """The same rows in other chunks."""
    edges = [0, *sorted(cuts), whole.num_rows]
    return pa.concat_tables([whole.slice(a, b - a) for a, b in itertools.pairwise(edges)])


def changed(kind: pa.DataType, value: Any) -> Any:
    """Another value of the same type."""
    if pa.types.is_list(kind):
        return [changed(kind.value_type, value[0]), *value[1:]]
    if pa.types.is_string(kind):
        return value + "x"
    if pa.types.is_boolean(kind):
        return not value
    return float(np.nextafter(np.float32(value), np.float32(np.inf))) if pa.types.is_floating(kind) else value + 1


def with_value(whole: pa.Table, column: str, row: int) -> pa.Table:
    """`whole` with one value changed."""
    field = whole.schema.field(column)
    values = whole.column(column).to_pylist()
    values[row] = changed(field.type, values[row])
    return whole.set_column(whole.schema.get_field_index(column), field, pa.array(values, field.type))


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), cuts=st.lists(st.integers(0, ROWS), max_size=4), data=st.data())
def test_chunks_row_groups_and_files_do_not_matter(name: str, cuts: list[int], data: st.DataObject) -> None:
    whole = table(name, ROWS)
    digest = content_digest(whole)
    assert content_digest(cut(whole, cuts)) == digest
    assert content_digest(whole.combine_chunks()) == digest
    start = data.draw(st.integers(0, ROWS))
    parts = [pq.read_table(pa.BufferReader(encode(part))) for part in (whole.slice(0, start), whole.slice(start))]
    assert content_digest(pa.concat_tables(parts)) == digest


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), row=st.integers(0, ROWS - 1), data=st.data())
def test_any_changed_value_matters_unless_it_is_volatile(name: str, row: int, data: st.DataObject) -> None:
    whole = table(name, ROWS)
    column = data.draw(st.sampled_from(whole.column_names))
    same = content_digest(with_value(whole, column, row)) == content_digest(whole)
    assert same == (column in VOLATILE)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=5), st.data())
def test_where_lists_and_texts_end_matters(rows: list[list[int]], data: st.DataObject) -> None:
    """The same elements end to end, cut into rows elsewhere, are other data."""
    flat = [item for row in rows for item in row]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), min_size=len(rows) - 1, max_size=len(rows) - 1)))
    edges = [0, *cuts, len(flat)]
    others = [flat[a:b] for a, b in itertools.pairwise(edges)]
    lists = [pa.table({"x": pa.array(value, pa.list_(pa.int32()))}) for value in (rows, others)]
    texts = [pa.table({"x": ["".join(map(str, row)) for row in value]}) for value in (rows, others)]
    for one, other in (lists, texts):
        assert (content_digest(one) == content_digest(other)) == (rows == others)


def test_names_types_and_order_matter() -> None:
    base = pa.table({"a": pa.array([1, 2], pa.int32()), "b": pa.array([3, 4], pa.int32())})
    others = [
        base.rename_columns(["a", "c"]),
        base.select(["b", "a"]),
        base.slice(0, 1),
        base.take([1, 0]),
        base.set_column(0, "a", pa.array([1, 2], pa.int64())),
    ]
    assert len({content_digest(other) for other in [base, *others]}) == 6


def test_every_bit_of_a_float_counts() -> None:
    values = [0.0, -0.0, float("nan"), float("inf"), 1.0]
    assert len({content_digest(pa.table({"x": pa.array([v], pa.float32())})) for v in values}) == 5


def test_a_large_table_has_the_digest_of_its_parts_put_together() -> None:
    rng = np.random.default_rng(0)
    large = pa.table({f"c{i}": rng.integers(0, 9, 400_000) for i in range(4)})  # hashed by several threads
    small = pa.table({name: large.column(name) for name in ["c0"]})
    assert content_digest(large) == content_digest(cut(large, [7, 300_001]))
    assert content_digest(large) != content_digest(small)


def test_nulls_and_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="without nulls"):
        content_digest(pa.table({"x": pa.array([1, None])}))
    with pytest.raises(TypeError, match="no content digest is defined for timestamp"):
        content_digest(pa.table({"x": pa.array([0], pa.timestamp("us"))}))
