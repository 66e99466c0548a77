"""The scalars of an iteration are joined by sample, never by place."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from areal_tasks.stages.scalars import aligned
from schemas.tables import TRAIN_SAMPLES

IDS = pa.chunked_array([["a", "b"], ["c"]])


def trained(*rows: tuple[str, int, float]) -> pa.Table:
    """Rows of `TRAIN_SAMPLES`, of which only the sample, the minibatch and the loss matter here."""
    others = {
        "sample_logprob_gap": 0.01,
        "micro_batch": 1,
        "sample_ratio": 1.0,
        "sample_clip_fraction": 0.25,
        "sample_kl": 0.5,
    }
    records = [{"sample_id": name, "minibatch": batch, "sample_loss": loss, **others} for name, batch, loss in rows]
    return pa.Table.from_pylist(records, schema=TRAIN_SAMPLES)


def test_rows_in_the_same_order_are_taken_as_they_are() -> None:
    table = trained(("a", 0, 1.0), ("b", 1, 2.0), ("c", 0, 3.0))
    assert aligned(IDS, table) is table


def test_shuffled_rows_are_put_in_order() -> None:
    found = aligned(IDS, trained(("c", 0, 3.0), ("a", 2, 1.0), ("b", 1, 2.0)))
    assert found["sample_id"].to_pylist() == ["a", "b", "c"]
    assert found["minibatch"].to_pylist() == [2, 1, 0]
    assert found["sample_loss"].to_pylist() == [1.0, 2.0, 3.0]


def test_samples_that_were_not_trained_on_have_minibatch_minus_one() -> None:
    found = aligned(IDS, trained(("c", 4, 3.0), ("a", 2, 1.0))).to_pylist()
    assert [row["minibatch"] for row in found] == [2, -1, 4]
    assert [row["micro_batch"] for row in found] == [1, -1, 1]
    assert math.isnan(found[1].pop("sample_logprob_gap"))
    assert found[1] == {
        "sample_id": "b",
        "minibatch": -1,
        "micro_batch": -1,
        "sample_ratio": 0.0,
        "sample_clip_fraction": 0.0,
        "sample_kl": 0.0,
        "sample_loss": 0.0,
    }


def test_no_sample_was_trained_on() -> None:
    found = aligned(IDS, trained())
    assert found["minibatch"].to_pylist() == [-1, -1, -1]
    assert not any(column.null_count for column in found.columns)


@pytest.mark.parametrize("count", [3, 5000])
def test_any_number_of_rows(count: int) -> None:
    ids = pa.chunked_array([[f"{i}-0" for i in range(count)]])
    rows = [(f"{i}-0", i, float(i)) for i in reversed(range(0, count, 2))]
    found = aligned(ids, trained(*rows))
    assert found["sample_id"].equals(ids)
    assert found["minibatch"].to_pylist() == [i if i % 2 == 0 else -1 for i in range(count)]
