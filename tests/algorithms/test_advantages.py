"""GRPO's advantages: hand-computed cases, and laws."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.advantages import Advantages, grpo_advantages, kl_penalty

NAN = math.nan
OWN_GROUP = st.sampled_from(["mean_std", "mean", "none"])  # what depends on a sample's own group only
NORMS = st.one_of(OWN_GROUP, st.just("mean_batch_std"))


class Sample(NamedTuple):
    reward: float
    group: int
    kept: bool
    penalties: list[float]  # one for each generated token


NUMBER = st.floats(-2, 2, width=16)
SAMPLES = st.lists(
    st.builds(Sample, NUMBER, st.integers(0, 3), st.booleans(), st.lists(NUMBER, max_size=4)), min_size=1, max_size=10
)


def compute(
    samples: list[Sample], reward_norm: str = "mean_std", advantage_norm: str = "none", kl: bool = True
) -> Advantages:
    penalty = torch.tensor([p for s in samples for p in s.penalties], dtype=torch.float64)
    return grpo_advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor([s.group for s in samples]),
        torch.tensor([len(s.penalties) for s in samples]),
        torch.tensor([s.kept for s in samples]),
        reward_norm,
        advantage_norm,
        penalty if kl else None,
    )


def per_sample(samples: list[Sample], tokens: torch.Tensor) -> list[torch.Tensor]:
    return list(tokens.split([len(s.penalties) for s in samples]))


def test_without_kl_each_token_has_its_samples_relative_reward() -> None:
    samples = [Sample(1, 5, True, [9, 9]), Sample(0, 5, True, [9]), Sample(1, 8, True, [9])]
    result, half = compute(samples, kl=False), math.sqrt(0.5)
    torch.testing.assert_close(result.advantages.float(), torch.tensor([half, half, -half, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.shaped_reward.float(), torch.tensor([half, -half, 0.0]), atol=1e-5, rtol=0)
    assert torch.equal(result.returns, result.advantages)


def test_kl_in_the_reward_by_hand() -> None:
    """Tokens lose .1, .2, .4; a token's return is the reward less what is still to be paid."""
    result = compute([Sample(1, 0, True, [0.1, 0.2, 0.4]), Sample(0, 0, True, [])], "mean")
    torch.testing.assert_close(result.returns.float(), torch.tensor([-0.2, -0.1, 0.1]))
    torch.testing.assert_close(result.shaped_reward.float(), torch.tensor([-0.2, -0.5]))


def test_penalty_is_beta_times_k1() -> None:
    penalty = kl_penalty(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0]), 0.1)
    torch.testing.assert_close(penalty, torch.tensor([0.1, -0.2]))


def test_advantage_norm_counts_kept_tokens_only() -> None:
    samples = [
        Sample(4, 0, True, [0, 0]),
        Sample(1, 0, True, [0]),
        Sample(NAN, 0, False, [NAN]),
        Sample(1, 1, True, [0]),
    ]
    batch = compute(samples, "none", "batch").advantages
    values = torch.tensor([4.0, 4.0, 1.0, 1.0], dtype=torch.float64)
    expected = (values - 2.5) / math.sqrt(3)
    torch.testing.assert_close(batch[[0, 1, 2, 4]], expected, atol=1e-5, rtol=0)
    group = compute(samples, "none", "group").advantages
    torch.testing.assert_close(group[:3], (values[:3] - 3) / math.sqrt(3), atol=1e-5, rtol=0)
    assert batch[3] == group[3] == group[4] == 0


@pytest.mark.parametrize("advantage_norm", ["none", "group", "batch"])
@pytest.mark.parametrize("reward_norm", ["mean_std", "mean_batch_std", "mean", "none"])
def test_nan_of_dropped_samples_never_leaks(reward_norm: str, advantage_norm: str) -> None:
    samples = [Sample(1, 0, True, [0.1, 0.3]), Sample(NAN, 0, False, [NAN, NAN]), Sample(0, 0, True, [0.2])]
    with_nan = compute(samples, reward_norm, advantage_norm)
    assert all(tensor.isfinite().all() for tensor in with_nan)
    without = compute([samples[0], samples[2]], reward_norm, advantage_norm)
    assert torch.equal(with_nan.advantages[[0, 1, 4]], without.advantages)
    assert with_nan.advantages[2:4].tolist() == [0.0, 0.0] and with_nan.shaped_reward[1] == 0


@given(SAMPLES, NORMS, st.booleans(), st.randoms())
def test_permuted_samples_have_permuted_advantages(samples: list[Sample], norm: str, kl: bool, random) -> None:
    order = random.sample(range(len(samples)), len(samples))
    shuffled = [samples[i] for i in order]
    before, after = compute(samples, norm, "batch", kl), compute(shuffled, norm, "batch", kl)
    parts = per_sample(samples, before.advantages)
    torch.testing.assert_close(after.advantages, torch.cat([parts[i] for i in order]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after.shaped_reward, before.shaped_reward[order])


@given(SAMPLES, OWN_GROUP, st.sampled_from(["none", "group"]), st.booleans(), st.data())
def test_a_dropped_sample_changes_only_its_own_group(
    samples: list[Sample], norm: str, advantage_norm: str, kl: bool, data: st.DataObject
) -> None:
    dropped = data.draw(st.integers(0, len(samples) - 1))
    fewer = [s._replace(kept=False, reward=NAN) if i == dropped else s for i, s in enumerate(samples)]
    before, after = compute(samples, norm, advantage_norm, kl), compute(fewer, norm, advantage_norm, kl)
    pairs = zip(per_sample(samples, before.advantages), per_sample(samples, after.advantages), strict=True)
    for sample, (one, other) in zip(samples, pairs, strict=True):
        assert sample.group == samples[dropped].group or torch.equal(one, other)


@given(SAMPLES, st.integers(-50, 50), st.sampled_from(["mean_std", "mean_batch_std", "mean"]))
def test_adding_a_constant_to_all_rewards_changes_nothing(samples: list[Sample], shift: int, norm: str) -> None:
    shifted = [s._replace(reward=s.reward + shift) for s in samples]
    torch.testing.assert_close(
        compute(shifted, norm).advantages, compute(samples, norm).advantages, atol=1e-4, rtol=1e-4
    )


@given(SAMPLES, NORMS, st.booleans())
def test_first_return_is_the_shaped_reward(samples: list[Sample], norm: str, kl: bool) -> None:
    result = compute(samples, norm, "batch", kl)
    for shaped, tokens in zip(result.shaped_reward, per_sample(samples, result.returns), strict=True):
        if len(tokens):
            torch.testing.assert_close(tokens[0], shaped)


def test_groups_of_one_learn_nothing_from_a_relative_reward() -> None:
    samples = [Sample(1, 0, True, [0.0]), Sample(5, 1, True, [0.0])]
    assert compute(samples, "mean_std").advantages.tolist() == [0.0, 0.0]
    assert compute(samples, "none").advantages.tolist() == [1.0, 5.0]
