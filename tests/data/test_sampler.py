"""The prompt order is a permutation that any worker can compute anywhere, and always the same."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.data.sampler import (
    derive,
    permutation,
    position,
    rank_positions,
    rank_rows,
    row_of_group,
    sampling_seed,
)

SEEDS = st.integers(0, 2**31 - 1)
EPOCHS = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 700), seed=SEEDS, epoch=EPOCHS)
def test_an_epoch_visits_every_row_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(i, n, seed, epoch) for i in range(n)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 400), ranks=st.integers(1, 17), seed=SEEDS, epoch=EPOCHS)
def test_ranks_partition_an_epoch_exactly(n: int, ranks: int, seed: int, epoch: int) -> None:
    slices = [list(rank_rows(n, seed, epoch, rank, ranks)) for rank in range(ranks)]
    assert sorted(row for rows in slices for row in rows) == list(range(n))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 10**12), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_any_position_of_any_size_stays_inside(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, n - 1))
    assert 0 <= permutation(index, n, seed, epoch) < n


@settings(max_examples=40, deadline=None)
@given(n=st.integers(20, 200), seed=SEEDS, epoch=EPOCHS)
def test_epochs_and_seeds_have_their_own_orders(n: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [permutation(i, n, seed, epoch) for i in range(n)]

    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


def test_a_position_costs_the_same_however_many_precede_it() -> None:
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        for index in range(0, 10**15, 10**13):
            permutation(index, 10**15, 1, 0)
    finally:
        sys.setprofile(None)
    assert len(calls) < 100 * 1000  # for 100 positions of a data set that nobody could shuffle


def test_the_order_looks_shuffled() -> None:
    n = 10_000
    order = [permutation(i, n, 7, 0) for i in range(n)]
    assert sum(abs(a - b) for a, b in pairwise(order)) / n == pytest.approx(n / 3, rel=0.05)
    assert sum(i == row for i, row in enumerate(order)) < 10


def test_the_numbers_never_change() -> None:
    """Written down once: another platform or a later release must compute the same, or resumed runs would differ."""
    assert [permutation(i, 10, 1, 0) for i in range(10)] == ORDER
    assert sampling_seed(1, 2, 3) == 3796285929887876107
    assert sampling_seed(1, 2, 3, 1) != sampling_seed(1, 2, 3)


ORDER = [int(digit) for digit in "9832751460"]


def test_groups_walk_through_epochs() -> None:
    assert position(0, 7) == (0, 0)
    assert position(20, 7) == (2, 6)
    assert sorted(row_of_group(group, 7, 3) for group in range(7, 14)) == list(range(7))


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
        permutation(5, 5, 1, 0)
    with pytest.raises(IndexError, match="rank 3"):
        rank_positions(10, 3, 3)
