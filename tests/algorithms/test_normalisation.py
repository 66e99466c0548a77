"""Normalisation within groups and batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.normalisation import group_rewards, whiten

NAN = math.nan
SAMPLES = st.lists(
    st.tuples(st.integers(-16, 16).map(lambda n: n / 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)
HOW = st.sampled_from(["mean_std", "mean", "none"])
Samples = list[tuple[float, int, bool]]


def columns(samples: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rewards, groups, kept = zip(*samples, strict=True)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(kept)


def test_by_hand() -> None:
    """Group 7 holds 1, 0, 0, 1 (mean 1/2, population deviation 1/2); group 2 holds 3, 0, 0; order is mixed."""
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([7, 2, 7, 2, 7, 2, 7])
    kept = torch.ones(7, dtype=torch.bool)
    low, high = -1 / math.sqrt(2), math.sqrt(2)
    torch.testing.assert_close(
        group_rewards(rewards, groups, kept, "mean_std"),
        torch.tensor([1.0, high, -1.0, low, -1.0, low, 1.0]),
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(
        group_rewards(rewards, groups, kept, "mean"), torch.tensor([0.5, 2.0, -0.5, -1.0, -0.5, -1.0, 0.5])
    )
    assert torch.equal(group_rewards(rewards, groups, kept, "none"), rewards)


@pytest.mark.parametrize("reward", [0.1, 1.0, 1e8])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward: float) -> None:
    rewards, groups = torch.tensor([reward] * 3 + [5.0]), torch.tensor([0, 0, 0, 9])
    for how in ("mean_std", "mean"):
        assert group_rewards(rewards, groups, torch.ones(4, dtype=torch.bool), how).tolist() == [0.0] * 4


def test_equal_values_give_exactly_zero_where_their_mean_is_rounded() -> None:
    tenths = torch.full((10,), 0.1, dtype=torch.float64)
    assert sum(tenths.tolist()) / 10 != 0.1
    assert whiten(tenths, None).tolist() == [0.0] * 10


def test_a_kept_nan_stays_visible_in_its_own_group() -> None:
    result = group_rewards(
        torch.tensor([NAN, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), "mean"
    )
    assert result[:2].isnan().all() and result[2:].tolist() == [0.5, -0.5]


def test_what_is_not_kept_is_zero_and_may_be_nan() -> None:
    kept = torch.tensor([True, False, True])
    result = group_rewards(torch.tensor([1.0, NAN, 0.0]), torch.tensor([0, 0, 0]), kept, "mean")
    assert result.tolist() == [0.5, 0.0, -0.5]


def test_nothing_kept() -> None:
    rewards, groups = torch.tensor([NAN, NAN]), torch.tensor([0, 1])
    assert group_rewards(rewards, groups, torch.zeros(2, dtype=torch.bool), "mean_std").tolist() == [0.0, 0.0]


@given(SAMPLES, HOW, st.randoms())
def test_permuted_samples_have_permuted_results(samples: Samples, how: str, random) -> None:
    order = random.sample(range(len(samples)), len(samples))
    result = group_rewards(*columns(samples), how)
    permuted = group_rewards(*columns([samples[i] for i in order]), how)
    torch.testing.assert_close(permuted, result[order])


@given(SAMPLES, HOW, st.data())
def test_dropping_a_sample_changes_no_bit_of_other_groups(samples: Samples, how: str, data: st.DataObject) -> None:
    rewards, groups, kept = columns(samples)
    dropped = data.draw(st.integers(0, len(samples) - 1))
    fewer = kept.clone()
    fewer[dropped] = False
    others = groups != groups[dropped]
    before, after = group_rewards(rewards, groups, kept, how), group_rewards(rewards, groups, fewer, how)
    assert torch.equal(before[others], after[others])


@given(SAMPLES, st.integers(-100, 100), st.sampled_from(["mean_std", "mean"]))
def test_adding_a_constant_to_all_rewards_changes_nothing(samples: Samples, shift: int, how: str) -> None:
    rewards, groups, kept = columns(samples)
    rewards = rewards.double()
    torch.testing.assert_close(
        group_rewards(rewards + shift, groups, kept, how),
        group_rewards(rewards, groups, kept, how),
        atol=1e-4,
        rtol=1e-4,
    )


@given(SAMPLES)
def test_kept_samples_of_a_group_have_mean_zero_and_deviation_one_or_zero(samples: Samples) -> None:
    rewards, groups, kept = columns(samples)
    result = group_rewards(rewards.double(), groups, kept, "mean_std")
    for group in set(groups[kept].tolist()):
        members = result[kept & (groups == group)]
        varied = len(set(rewards[kept & (groups == group)].tolist())) > 1
        assert members.mean().item() == pytest.approx(0, abs=1e-9)
        assert members.std(correction=0).item() == pytest.approx(float(varied), abs=1e-4)


def test_whiten_over_the_batch_and_within_groups() -> None:
    values, groups = torch.tensor([0.0, 2.0, 10.0, 14.0]), torch.tensor([4, 4, 1, 1])
    torch.testing.assert_close(whiten(values, groups), torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-5, rtol=0)
    expected = (values - 6.5) / values.std(correction=0)
    torch.testing.assert_close(whiten(values, None), expected, atol=1e-5, rtol=0)


def test_whiten_of_nothing_and_of_equal_values() -> None:
    assert whiten(torch.zeros(0), None).tolist() == []
    assert whiten(torch.full((3,), 0.1), None).tolist() == [0.0, 0.0, 0.0]
