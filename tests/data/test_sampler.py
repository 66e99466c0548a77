"""The prompt order is a permutation that any worker can compute anywhere, and always the same."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from areal_tasks.data.sampler import (
    MAX_SHUFFLED_ROWS,
    derive,
    permutation,
    position,
    row_of_group,
    sampling_seed,
)
from schemas.manifest import PROMPT_ORDER

SEEDS = st.integers(0, 2**31 - 1)
EPOCHS = st.integers(0, 10_000)
ORDERS = st.integers(1, PROMPT_ORDER)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 700), seed=SEEDS, epoch=EPOCHS, order=ORDERS)
def test_an_epoch_visits_every_row_once(n: int, seed: int, epoch: int, order: int) -> None:
    assert sorted(permutation(i, n, seed, epoch, order) for i in range(n)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 10**12), seed=SEEDS, epoch=EPOCHS, order=ORDERS, data=st.data())
def test_any_position_of_any_size_stays_inside(n: int, seed: int, epoch: int, order: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, n - 1))
    assert 0 <= permutation(index, n, seed, epoch, order) < n


@settings(max_examples=40, deadline=None)
@given(n=st.integers(20, 200), seed=SEEDS, epoch=EPOCHS, order=ORDERS)
def test_epochs_and_seeds_have_their_own_orders(n: int, seed: int, epoch: int, order: int) -> None:
    def whole(seed: int, epoch: int) -> list[int]:
        return [permutation(i, n, seed, epoch, order) for i in range(n)]

    assert whole(seed, epoch) != whole(seed, epoch + 1)
    assert whole(seed, epoch) != whole(seed + 1, epoch)


def test_a_position_costs_the_same_however_many_precede_it() -> None:
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        for index in range(0, 10**15, 10**13):
            permutation(index, 10**15, 1, 0, PROMPT_ORDER)
    finally:
        sys.setprofile(None)
    assert len(calls) < 100 * 1000  # for 100 positions of a data set too large to shuffle


def test_the_order_looks_shuffled() -> None:
    n = 10_000
    order = [permutation(i, n, 7, 0, PROMPT_ORDER) for i in range(n)]
    assert sum(abs(a - b) for a, b in pairwise(order)) / n == pytest.approx(n / 3, rel=0.05)
    assert sum(i == row for i, row in enumerate(order)) < 10


def test_the_numbers_never_change() -> None:
    """Written down once: another platform or a later release must compute the same, or resumed runs would differ."""
    assert [permutation(i, 10, 1, 0, 1) for i in range(10)] == FIRST
    assert [permutation(i, 10, 1, 0, 2) for i in range(10)] == SECOND
    for n in (MAX_SHUFFLED_ROWS + 1, 1000):
        assert all(permutation(i, n, 1, 0, 1) == permutation(i, n, 1, 0, 2) for i in range(n))
    assert sampling_seed(1, 2, 3) == 3796285929887876107
    assert sampling_seed(1, 2, 3, 1) != sampling_seed(1, 2, 3)


FIRST = [int(digit) for digit in "9832751460"]
SECOND = [int(digit) for digit in "8320175946"]


# ── uniform orders ──────────────────────────────────────────────────────────────────────────────────────────────────


def orders(n: int, count: int) -> NDArray[np.int64]:
    """[count, n]: the orders of the seeds below `count` and of as many epochs of one seed, half and half."""
    keys = [(seed, 0) for seed in range(count // 2)] + [(7, epoch) for epoch in range(1, count // 2 + 1)]
    return np.array([[permutation(i, n, seed, epoch, PROMPT_ORDER) for i in range(n)] for seed, epoch in keys])


def excess(counts: NDArray[np.int64]) -> float:
    """Pearson's chi-square of counts that are equally likely, in standard deviations above its mean."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_rows_is_equally_likely(n: int) -> None:
    found = Counter(map(tuple, orders(n, 30_000)))
    counts = np.array([found[order] for order in permutations(range(n))])
    assert counts.sum() == 30_000
    assert excess(counts) < 4  # the first order: 18 for n = 5


@pytest.mark.parametrize(
    ("n", "count"), [(5, 20_000), (8, 80_000), (13, 20_000), (32, 10_000), (MAX_SHUFFLED_ROWS, 10_000)]
)
def test_two_places_of_a_small_order_hold_any_two_rows_equally_often(n: int, count: int) -> None:
    """Every pair of places of n ≤ 8, else those of the first and last two: all pairs of rows are counted."""
    found = orders(n, count)
    places = range(n) if n <= 8 else (0, 1, n - 2, n - 1)
    found_excess = []
    for a, b in combinations(places, 2):
        counts = np.bincount(found[:, a] * n + found[:, b], minlength=n * n).reshape(n, n)
        assert not counts.diagonal().any()
        found_excess.append(excess(counts[~np.eye(n, dtype=bool)]))
    assert max(found_excess) < 4
    assert sum(found_excess) / math.sqrt(len(found_excess)) < 4  # together; the first order: 5 for n = 8


def test_groups_walk_through_epochs() -> None:
    assert position(0, 7) == (0, 0)
    assert position(20, 7) == (2, 6)
    assert sorted(row_of_group(group, 7, 3, PROMPT_ORDER) for group in range(7, 14)) == list(range(7))


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.integers(0, 2**62), min_size=4, max_size=4))
def test_sampling_seeds_fit_sixty_two_bits(parts: list[int]) -> None:
    assert 0 <= sampling_seed(*parts) < 2**62


def test_sampling_seeds_do_not_collide() -> None:
    seeds = {sampling_seed(1, group, sample, again) for group in range(500) for sample in range(16) for again in (0, 1)}
    assert len(seeds) == 500 * 16 * 2


def test_parts_outside_the_domain_are_refused() -> None:
    with pytest.raises(ValueError, match="must be in"):
        derive(-1)
    with pytest.raises(IndexError, match="outside"):
        permutation(5, 5, 1, 0, PROMPT_ORDER)
