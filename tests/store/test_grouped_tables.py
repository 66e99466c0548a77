"""Tables that several rollout workers write: the same rows and digest, whoever wrote which groups."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import table

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.digest import combine_groups, group_digests, table_digest
from areal_tasks.store.shards import in_order, read_table, write_table
from schemas.manifest import TableRef

ROWS = table("verify", rows=48)  # groups 0 … 11 of four samples


def written(store: Store, prefix: str, parts: list[pa.Table]) -> TableRef:
    """The table as the flow commits it: each worker's shards, and one digest of all groups."""
    refs = [write_table(store, f"{prefix}/worker={i}", "verify", part) for i, part in enumerate(parts)]
    digests = {group: digest for part in parts for group, digest in group_digests(part).items()}
    shards = tuple(shard for ref in refs for shard in ref.shards)
    return TableRef(name="verify", digest=combine_groups(digests), shards=shards, grouped=True)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_who_wrote_which_groups_changes_neither_rows_nor_digest(tmp_path: Path, owners: list[int]) -> None:
    """Each writes its own in order."""
    store = open_store((tmp_path / "store").as_uri())
    parts = [[ROWS.slice(4 * g, 4) for g in range(12) if owners[g] == worker] for worker in range(3)]
    ref = written(store, f"run/{uuid.uuid4().hex}", [pa.concat_tables(part) for part in parts if part])
    assert read_table(store, ref).equals(ROWS)
    assert read_table(store, ref, ["verdict"]).equals(ROWS.select(["verdict"]))
    assert ref.digest == table_digest(ROWS, grouped=True)


def test_a_groups_digest_depends_on_every_value_and_on_no_other_group() -> None:
    one, all_ = group_digests(ROWS.slice(8, 4)), group_digests(ROWS)
    assert one == {2: all_[2]}
    altered = ROWS.set_column(2, ROWS.schema.field(2), pa.array(["correct", *ROWS["verdict"].to_pylist()[1:]]))
    assert [g for g, digest in group_digests(altered).items() if digest != all_[g]] == [0]


def test_groups_are_ordered_by_number() -> None:
    rows = table("verify", rows=48)
    assert in_order(rows.take(pa.array(range(47, -1, -1)))).equals(rows)


def test_rows_of_a_group_that_are_apart_have_no_digest() -> None:
    with pytest.raises(ValueError, match="follow each other"):
        group_digests(ROWS.take(pa.array([0, 4, 1])))
