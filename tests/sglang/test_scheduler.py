"""How many places must be free before samples that wait begin, with SGLang's own rule from its module as published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_tasks.engines.sglang.scheduler import begin_in_batches


def published(wanted: int | None, most: int, is_dflash_family: bool = False) -> int | None:
    """As `resolve_min_free_slots` of SGLang 0.5.17: four places at most."""
    formula = min(4, max(2, (most + 5) // 6))
    if wanted is None:
        wanted = formula if is_dflash_family else None
    return None if wanted is None or wanted <= 1 or most < 8 else min(wanted, formula)


@pytest.mark.parametrize(
    ("wanted", "most", "expected"), [(None, 512, None), (2, 512, 51), (2, 1024, 102), (100, 512, 100), (2, 10, 2)]
)
def test_a_tenth_of_the_places_is_free_when_samples_begin(wanted: int | None, most: int, expected: int | None) -> None:
    scheduler = SimpleNamespace(resolve_min_free_slots=published)
    begin_in_batches(scheduler)
    assert scheduler.resolve_min_free_slots(wanted, most, is_dflash_family=False) == expected
