"""Minibatches, micro-batches and layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.data.batching import (
    LEFT_OUT,
    LayoutKind,
    counted_tokens,
    make_layout,
    make_sequences,
    micro_batches,
    minibatches,
    spans,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(st.lists(st.booleans(), max_size=70), st.integers(1, 9), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_minibatches_deal_the_kept_samples_out_in_equal_numbers(
    kept: list[bool], count: int, seed: int, iteration: int
) -> None:
    mask = torch.tensor(kept, dtype=torch.bool)
    found = minibatches(mask, count, seed, iteration)
    sizes = torch.bincount(found[mask], minlength=count)
    assert torch.equal(found == LEFT_OUT, ~mask)
    assert len(sizes) == count
    assert sizes.max() - sizes.min() <= 1


def test_minibatches_are_a_function_of_seed_and_iteration() -> None:
    kept = torch.ones(64, dtype=torch.bool)
    first = minibatches(kept, 4, 1, 0)
    assert torch.equal(first, minibatches(kept, 4, 1, 0))
    assert not torch.equal(first, minibatches(kept, 4, 1, 1))
    assert not torch.equal(first, minibatches(kept, 4, 2, 0))


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood's finaliser, in Python's own integers."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_minibatches_shuffle_by_splitmix64() -> None:
    state = _splitmix64(_splitmix64(5) ^ 11)
    keys = [_splitmix64((state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(30)]
    order = sorted(range(30), key=lambda i: _signed(keys[i]))
    expected = [order.index(i) * 3 // 30 for i in range(30)]
    assert minibatches(torch.ones(30, dtype=torch.bool), 3, 5, 11).tolist() == expected


def test_minibatches_mix_groups_evenly() -> None:
    """Each sample lands in each of 4 minibatches in a quarter of 2,000 iterations, within 5 standard deviations."""
    kept = torch.ones(32, dtype=torch.bool)
    plans = torch.stack([minibatches(kept, 4, 3, k) for k in range(2000)])
    shares = torch.stack([(plans == m).double().mean(0) for m in range(4)])
    assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5


def _cost(lengths: torch.Tensor, kind: str) -> int:
    return int(lengths.sum()) if kind == "packed" else len(lengths) * int(lengths.max())


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 300), st.sampled_from(["packed", "padded"]))
def test_micro_batches_keep_within_the_budget(lengths: list[int], budget: int, kind: str) -> None:
    tensor = torch.tensor(lengths)
    found = micro_batches(tensor, budget, kind)  # type: ignore[arg-type]
    numbers = range(int(found.max()) + 1)
    for number in numbers:
        part = tensor[found == number]
        assert len(part) > 0
        assert _cost(part, kind) <= budget or len(part) == 1


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 300), st.sampled_from(["packed", "padded"]), st.integers(1, 8))
def test_micro_batches_come_in_full_rounds_for_the_ranks(
    lengths: list[int], budget: int, kind: str, ranks: int
) -> None:
    tensor = torch.tensor(lengths)
    fewest = int(micro_batches(tensor, budget, kind).max()) + 1  # type: ignore[arg-type]
    found = micro_batches(tensor, budget, kind, ranks)  # type: ignore[arg-type]
    sizes = torch.bincount(found)
    rounded = -(-fewest // ranks) * ranks
    assert len(sizes) == (rounded if rounded <= len(lengths) else fewest)
    assert sizes.min() > 0
    for number in range(len(sizes)):
        part = tensor[found == number]
        assert _cost(part, kind) <= budget or len(part) == 1


def _greedy(lengths: list[int], budget: int, kind: str) -> list[list[int]]:
    """Descending lengths, cut where the next one would cost more than the budget."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and _cost(torch.tensor([*runs[-1], length]), kind) <= budget:
            runs[-1].append(length)
        else:
            runs.append([length])
    return runs


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 300), st.sampled_from(["packed", "padded"]), st.integers(1, 8))
def test_micro_batches_are_those_of_the_smallest_budget_that_needs_no_more(
    lengths: list[int], budget: int, kind: str, ranks: int
) -> None:
    """Found by trying all budgets; then the first of the largest is halved until there is one for each rank."""
    ordered = sorted(lengths, reverse=True)
    fewest = len(_greedy(ordered, budget, kind))
    rounded = -(-fewest // ranks) * ranks
    wanted = rounded if rounded <= len(lengths) else fewest
    enough = (_greedy(ordered, cap, kind) for cap in range(1, budget + 1))
    runs = next(found for found in enough if len(found) <= wanted)
    while len(runs) < wanted:
        at = max(range(len(runs)), key=lambda number: len(runs[number]))
        half = len(runs[at]) // 2
        runs[at : at + 1] = [runs[at][:half], runs[at][half:]]
    found = micro_batches(torch.tensor(lengths), budget, kind, ranks)  # type: ignore[arg-type]
    order = torch.tensor(lengths).sort(descending=True, stable=True).indices
    assert found[order].tolist() == [number for number, run in enumerate(runs) for _ in run]


def test_micro_batches_of_several_ranks_are_balanced() -> None:
    found = micro_batches(torch.full((40,), 10), 200, "packed", 4)
    assert torch.bincount(found).tolist() == [10, 10, 10, 10]


def test_micro_batches_are_one_when_the_budget_allows() -> None:
    assert micro_batches(torch.tensor([3, 9, 5]), 27, "padded").tolist() == [0, 0, 0]
    assert micro_batches(torch.tensor([3, 9, 5]), 17, "packed").tolist() == [0, 0, 0]
    assert micro_batches(torch.zeros(0, dtype=torch.int64), 17, "packed").tolist() == []


def test_micro_batches_are_balanced() -> None:
    lengths = torch.full((10,), 10)
    assert torch.bincount(micro_batches(lengths, 70, "packed")).tolist() == [5, 5]
    assert torch.bincount(micro_batches(lengths, 90, "padded")).tolist() == [5, 5]


def test_padded_micro_batches_put_like_lengths_together() -> None:
    found = micro_batches(torch.tensor([2, 30, 2, 30, 2, 2]), 60, "padded")
    assert found.tolist() == [1, 0, 1, 0, 1, 1]


def test_spans() -> None:
    assert spans(torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_layout_pairs_each_counted_token_with_the_position_before_it() -> None:
    ids = torch.arange(10, 19)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    sequences = make_sequences(ids, mask, torch.tensor([4, 2, 3]))
    assert counted_tokens(sequences, torch.arange(3)).tolist() == [2, 1, 2]  # no first token counts
    for kind in ("packed", "padded"):
        layout = make_layout(sequences, torch.tensor([2, 0]), kind)  # type: ignore[arg-type]
        flat = layout.input_ids.flatten()
        assert layout.targets.tolist() == [17, 18, 11, 13]
        assert flat[layout.predictors].tolist() == [16, 17, 10, 12]
        assert layout.samples.tolist() == [2, 2, 0, 0]
        assert ids[layout.where].tolist() == layout.targets.tolist()
        shape = (1, 5) if kind == "packed" else (2, 3)  # the last token of a sample predicts nothing
        assert layout.input_ids.shape == shape


def test_a_packed_row_says_where_samples_end_and_how_long_they_are() -> None:
    sequences = make_sequences(torch.arange(20), torch.ones(20, dtype=torch.bool), torch.tensor([6, 1, 10, 3]))
    layout = make_layout(sequences, torch.arange(4), "packed")
    assert layout.bounds is not None and layout.bounds.dtype == torch.int32
    assert layout.bounds.tolist() == [0, 5, 14, 16]  # the sample of one token has no cell
    assert layout.longest == 16
    assert make_layout(sequences, torch.arange(4), "padded").bounds is None


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_pass_without_samples_is_like_others_of_its_kind(kind: LayoutKind) -> None:
    """Some models compute padded passes only: one that evens out the ranks' numbers of them must not be packed."""
    sequences = make_sequences(torch.arange(20), torch.ones(20, dtype=torch.bool), torch.tensor([6, 1, 10, 3]))
    some, nothing = (make_layout(sequences, torch.arange(rows), kind) for rows in (4, 0))
    assert nothing.input_ids.shape == (1, 1) and len(nothing.targets) == 0
    for name in ("bounds", "position_ids"):
        assert (getattr(nothing, name) is None) == (getattr(some, name) is None)
    assert nothing.bounds is None or nothing.bounds.tolist() == [0, 1]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_the_bound_of_lengths_holds_and_takes_few_values(lengths: list[int]) -> None:
    total = sum(lengths)
    sequences = make_sequences(torch.zeros(total, dtype=torch.int64), torch.ones(total).bool(), torch.tensor(lengths))
    longest = make_layout(sequences, torch.arange(len(lengths)), "packed").longest
    assert max(lengths) - 1 <= longest < 2 * max(lengths)
    assert longest.bit_count() == 1


def test_a_sample_of_one_token_lays_out_and_counts_nothing() -> None:
    sequences = make_sequences(torch.tensor([3]), torch.tensor([True]), torch.tensor([1]))
    for kind in ("packed", "padded"):
        layout = make_layout(sequences, torch.tensor([0]), kind)  # type: ignore[arg-type]
        assert layout.input_ids.shape == (1, 1)
        assert len(layout.targets) == 0
