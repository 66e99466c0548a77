"""Which way new weights take, and what records say of weights that were handed over and not written."""

from __future__ import annotations

import pytest

from areal_tasks.engines.handover import choose_transport
from areal_tasks.launchers.gpus import Placement
from areal_tasks.stages.publish import is_written
from schemas.errors import UserError
from schemas.recipe.load import load_recipe

SHARED = Placement(("0",), (("0",), ("0",)))
APART = Placement(("0",), (("1",), ("2", "3")))
MIXED = Placement(("0",), (("0",), ("1",)))


@pytest.mark.parametrize(
    ("placement", "external", "expected"),
    [(SHARED, False, "tensor"), (APART, False, "nccl"), (MIXED, False, "store"), (Placement(), True, "store")],
)
def test_auto_takes_the_fastest_that_the_placement_allows(placement: Placement, external: bool, expected: str) -> None:
    assert choose_transport(load_recipe("gsm8k"), placement, external) == expected


def test_a_transport_that_the_placement_forbids_is_refused_with_the_reason() -> None:
    recipe = load_recipe("gsm8k", ["inference.transport=nccl"])
    with pytest.raises(UserError, match=r"nccl is not possible here.*possible: tensor, store"):
        choose_transport(recipe, SHARED, False)


def test_the_embedded_engine_reads_the_store() -> None:
    assert choose_transport(load_recipe("quickstart"), SHARED, False) == "store"


def test_versions_are_written_at_the_interval_at_the_end_and_where_they_are_evaluated() -> None:
    changes = ["trainer.weights_every=4", "evaluation.every=6", "schedule.iterations=11"]
    recipe = load_recipe("gsm8k", changes)
    assert [v for v in range(1, 12) if is_written(recipe, v)] == [4, 6, 8, 11]
