"""Normalisation within groups and batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.normalisation import EPS, group_rewards, whiten

NAN = math.nan
SAMPLES = st.lists(
    st.tuples(st.integers(-16, 16).map(lambda n: n / 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)
SCALED = ("mean_std", "mean_batch_std")
HOW = st.sampled_from([*SCALED, "mean", "none"])
Samples = list[tuple[float, int, bool]]


def columns(samples: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rewards, groups, kept = zip(*samples, strict=True)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(kept)


# ── as other systems compute it ─────────────────────────────────────────────────────────────────────────────────────


@st.composite
def whole_groups(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and groups of an equal number of samples, at least two, one group after the other. float64"""
    groups, size = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    reward = st.one_of(st.integers(0, 1).map(float), st.floats(-4, 4, width=16))
    rewards = draw(st.lists(reward, min_size=groups * size, max_size=groups * size))
    return torch.tensor(rewards, dtype=torch.float64), torch.arange(groups).repeat_interleave(size)


def trl(rewards: torch.Tensor, size: int, scale: str) -> torch.Tensor:
    """TRL 1.16, `GRPOTrainer`, with our EPS in place of its 1e-4: groups as rows, standard deviations as torch's."""
    rows = rewards.view(-1, size)
    deviation = rows.std(dim=1, keepdim=True) if scale == "group" else rewards.std()
    return ((rows - rows.mean(dim=1, keepdim=True)) / (deviation + EPS)).flatten()


def verl(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """verl's `compute_grpo_outcome_advantage` for groups of two and more: each group by its id."""
    result = torch.zeros_like(rewards)
    for group in groups.unique():
        own = rewards[groups == group]
        result[groups == group] = (own - own.mean()) / (own.std() + 1e-6)
    return result


@given(whole_groups())
def test_advantages_are_those_of_trl_and_verl(given_groups: tuple[torch.Tensor, torch.Tensor]) -> None:
    rewards, groups = given_groups
    size, kept = int((groups == 0).sum()), torch.ones(len(rewards), dtype=torch.bool)
    found = {how: group_rewards(rewards, groups, kept, how) for how in SCALED}  # type: ignore[arg-type]
    close = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(found["mean_std"], trl(rewards, size, "group"), **close)
    torch.testing.assert_close(found["mean_std"], verl(rewards, groups), **close)
    torch.testing.assert_close(found["mean_batch_std"], trl(rewards, size, "batch"), **close)


@pytest.mark.parametrize(("unbiased", "expected"), [(True, math.sqrt(0.5)), (False, 1.0)])
def test_a_group_of_two(unbiased: bool, expected: float) -> None:
    """The sample's deviation of 0 and 1 is √½, the population's ½: the advantages differ by √2."""
    found = group_rewards(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2).bool(), "mean_std", unbiased)
    assert found.tolist() == pytest.approx([expected, -expected], abs=1e-5)


# ── by hand ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_by_hand() -> None:
    """Group 7 holds 1, 0, 0, 1 (mean 1/2, deviation 1/2), group 2 holds 3, 0, 0 (mean 1, deviation √2), mixed."""
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([7, 2, 7, 2, 7, 2, 7])
    kept = torch.ones(7, dtype=torch.bool)
    low, high = -1 / math.sqrt(2), math.sqrt(2)
    population = torch.tensor([1.0, high, -1.0, low, -1.0, low, 1.0])
    centred = torch.tensor([0.5, 2.0, -0.5, -1.0, -0.5, -1.0, 0.5])
    sample = torch.tensor([math.sqrt(3 / 4 if group == 7 else 2 / 3) for group in groups.tolist()])
    batch = math.sqrt((11 - 7 * (5 / 7) ** 2) / 6)  # of 1, 3, 0, 0, 0, 0, 1
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(group_rewards(rewards, groups, kept, "mean_std", False), population, **close)
    torch.testing.assert_close(group_rewards(rewards, groups, kept, "mean_std"), population * sample, **close)
    torch.testing.assert_close(group_rewards(rewards, groups, kept, "mean_batch_std"), centred / batch, **close)
    torch.testing.assert_close(group_rewards(rewards, groups, kept, "mean"), centred)
    assert torch.equal(group_rewards(rewards, groups, kept, "none"), rewards)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1.0, 1e8])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward: float, unbiased: bool) -> None:
    rewards, groups = torch.tensor([reward] * 3 + [5.0]), torch.tensor([0, 0, 0, 9])
    for how in (*SCALED, "mean"):
        found = group_rewards(rewards, groups, torch.ones(4, dtype=torch.bool), how, unbiased)  # type: ignore[arg-type]
        assert found.tolist() == [0.0] * 4


@pytest.mark.parametrize("how", [*SCALED, "mean"])
def test_a_batch_of_one(how: str) -> None:
    assert group_rewards(torch.ones(1), torch.zeros(1).long(), torch.ones(1).bool(), how).tolist() == [0.0]  # type: ignore[arg-type]
    assert whiten(torch.ones(1), None).tolist() == [0.0]


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


@pytest.mark.parametrize("how", SCALED)
def test_nothing_kept(how: str) -> None:
    rewards, groups = torch.tensor([NAN, NAN]), torch.tensor([0, 1])
    assert group_rewards(rewards, groups, torch.zeros(2, dtype=torch.bool), how).tolist() == [0.0, 0.0]


# ── laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(SAMPLES, HOW, st.randoms())
def test_permuted_samples_have_permuted_results(samples: Samples, how: str, random) -> None:
    order = random.sample(range(len(samples)), len(samples))
    result = group_rewards(*columns(samples), how)
    permuted = group_rewards(*columns([samples[i] for i in order]), how)
    torch.testing.assert_close(permuted, result[order])


@given(SAMPLES, st.sampled_from(["mean_std", "mean", "none"]), st.data())
def test_dropping_a_sample_changes_no_bit_of_other_groups(samples: Samples, how: str, data: st.DataObject) -> None:
    rewards, groups, kept = columns(samples)
    dropped = data.draw(st.integers(0, len(samples) - 1))
    fewer = kept.clone()
    fewer[dropped] = False
    others = groups != groups[dropped]
    before, after = group_rewards(rewards, groups, kept, how), group_rewards(rewards, groups, fewer, how)
    assert torch.equal(before[others], after[others])


@given(SAMPLES, st.integers(-100, 100), st.sampled_from([*SCALED, "mean"]))
def test_adding_a_constant_to_all_rewards_changes_nothing(samples: Samples, shift: int, how: str) -> None:
    rewards, groups, kept = columns(samples)
    rewards = rewards.double()
    torch.testing.assert_close(
        group_rewards(rewards + shift, groups, kept, how),
        group_rewards(rewards, groups, kept, how),
        atol=1e-4,
        rtol=1e-4,
    )


@given(SAMPLES, st.booleans())
def test_kept_samples_of_a_group_have_mean_zero_and_deviation_one_or_zero(samples: Samples, unbiased: bool) -> None:
    rewards, groups, kept = columns(samples)
    result = group_rewards(rewards.double(), groups, kept, "mean_std", unbiased)
    for group in set(groups[kept].tolist()):
        members = result[kept & (groups == group)]
        varied = len(set(rewards[kept & (groups == group)].tolist())) > 1
        assert members.mean().item() == pytest.approx(0, abs=1e-9)
        deviation = members.std(correction=int(unbiased)).item() if len(members) > 1 else 0.0
        assert deviation == pytest.approx(float(varied), abs=1e-4)


@given(SAMPLES, HOW)
def test_a_group_of_equal_rewards_gets_exactly_zero(samples: Samples, how: str) -> None:
    """Whatever the other groups are; without a mean the reward is what it is."""
    rewards, groups, kept = columns(samples)
    result = group_rewards(rewards, groups, kept, how)
    for group in set(groups.tolist()):
        own = rewards[kept & (groups == group)]
        if how != "none" and len(set(own.tolist())) <= 1:
            assert not result[groups == group].any()


@given(SAMPLES, st.booleans())
def test_the_batch_scales_all_groups_alike(samples: Samples, unbiased: bool) -> None:
    rewards, groups, kept = columns(samples)
    rewards = rewards.double()
    scaled = group_rewards(rewards, groups, kept, "mean_batch_std", unbiased)
    deviation = rewards[kept].std(correction=int(unbiased)).item() if kept.sum() > 1 else 0.0
    torch.testing.assert_close(scaled * (deviation + EPS), group_rewards(rewards, groups, kept, "mean"))


@given(SAMPLES, HOW)
def test_a_batch_twice_has_the_advantages_of_one(samples: Samples, how: str) -> None:
    """The second time as groups of their own. The sample's deviation of a batch of n shrinks as √((n-1) / (n-½))."""
    rewards, groups, kept = columns(samples)
    rewards, twice = rewards.double(), columns([*samples, *((r, g + 4, k) for r, g, k in samples)])
    for unbiased in (True, False):
        once = group_rewards(rewards, groups, kept, how, unbiased)
        result = group_rewards(twice[0].double(), *twice[1:], how, unbiased)
        count = int(kept.sum())
        shrinks = math.sqrt((count - 1) / (count - 0.5)) if how == "mean_batch_std" and unbiased and count > 1 else 1.0
        torch.testing.assert_close(result.view(2, -1) * shrinks, once.expand(2, -1), atol=1e-4, rtol=1e-4)


@given(SAMPLES, st.sampled_from([0.5, 4.0, 1024.0]), st.sampled_from(SCALED))
def test_the_unit_of_the_reward_does_not_matter(samples: Samples, unit: float, how: str) -> None:
    rewards, groups, kept = columns(samples)
    rewards = rewards.double()
    expected = group_rewards(rewards, groups, kept, how)
    torch.testing.assert_close(group_rewards(rewards * unit, groups, kept, how), expected, atol=1e-4, rtol=1e-4)


def test_whiten_over_the_batch_and_within_groups() -> None:
    values, groups = torch.tensor([0.0, 2.0, 10.0, 14.0]), torch.tensor([4, 4, 1, 1])
    for unbiased, size in ((False, 1.0), (True, math.sqrt(0.5))):
        close = {"atol": 1e-5, "rtol": 0}
        expected = torch.tensor([-size, size, -size, size])
        torch.testing.assert_close(whiten(values, groups, unbiased), expected, **close)
        expected = (values - 6.5) / values.std(correction=int(unbiased))
        torch.testing.assert_close(whiten(values, None, unbiased), expected, **close)


def test_whiten_of_nothing_and_of_equal_values() -> None:
    assert whiten(torch.zeros(0), None).tolist() == []
    assert whiten(torch.full((3,), 0.1), None).tolist() == [0.0, 0.0, 0.0]
