"""The clipped objective and the token weights, by hand and by their laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.losses import policy_terms, sft_terms, token_weights

CLIP = 0.2
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
HOW = st.sampled_from(["token_mean", "sequence_mean"])


def terms_at(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient with respect to the logprobs, and clipped, at the given ratios."""
    logprobs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    terms = policy_terms(logprobs, torch.zeros(len(ratios)), torch.tensor(advantages), CLIP)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    torch.testing.assert_close(terms.ratio, torch.tensor(ratios))
    return terms.loss.detach(), gradient, terms.clipped


def test_each_case_of_the_clip_by_hand() -> None:
    """PPO, figure 1: only a ratio that has moved further than ε in the advantage's direction is cut off."""
    loss, gradient, clipped = terms_at([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0])
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.4, -1.0, 3.0, 1.6]))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.0, -1.0, 3.0, 0.0]))
    assert clipped.tolist() == [False, True, False, False, True]


@given(st.floats(0.05, 10), st.floats(-5, 5))
def test_loss_is_the_larger_of_both_and_the_gradient_is_zero_where_clipped(ratio: float, advantage: float) -> None:
    loss, gradient, clipped = terms_at([ratio], [advantage])
    bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
    assert loss.item() == pytest.approx(max(-ratio * advantage, -bounded * advantage), rel=1e-4, abs=1e-6)
    expected = 0.0 if clipped.item() else -ratio * advantage
    assert gradient.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_first_step_is_the_plain_policy_gradient() -> None:
    _, gradient, clipped = terms_at([1.0, 1.0], [3.0, -0.5])
    assert gradient.tolist() == [-3.0, 0.5]
    assert not clipped.any()


def test_ratio_and_clipped_carry_no_gradient() -> None:
    terms = policy_terms(torch.zeros(2, requires_grad=True), torch.zeros(2), torch.ones(2), CLIP)
    assert terms.loss.requires_grad and not terms.ratio.requires_grad


def test_sft_loss_of_a_uniform_guess() -> None:
    logprobs = torch.full((5,), 1 / 8).log()
    assert (token_weights(torch.tensor([2, 3]), "token_mean") * sft_terms(logprobs)).sum().item() == pytest.approx(
        math.log(8)
    )


def test_weights_by_hand() -> None:
    lengths = torch.tensor([1, 0, 3])
    torch.testing.assert_close(token_weights(lengths, "token_mean"), torch.full((4,), 0.25))
    torch.testing.assert_close(token_weights(lengths, "sequence_mean"), torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]))


@given(LENGTHS, HOW)
def test_weights_add_up_to_one(lengths: list[int], how: str) -> None:
    weights = token_weights(torch.tensor(lengths), how)
    assert weights.shape == (sum(lengths),)
    assert weights.sum().item() == pytest.approx(1.0 if sum(lengths) else 0.0)


@given(st.integers(1, 6), st.integers(1, 6))
def test_both_means_agree_on_equal_lengths(sequences: int, length: int) -> None:
    lengths = torch.full((sequences,), length)
    torch.testing.assert_close(token_weights(lengths, "token_mean"), token_weights(lengths, "sequence_mean"))


@given(LENGTHS, HOW, st.randoms())
def test_permuted_sequences_have_permuted_weights(lengths: list[int], how: str, random) -> None:
    order = random.sample(range(len(lengths)), len(lengths))
    weights = token_weights(torch.tensor(lengths), how).split(lengths)
    permuted = token_weights(torch.tensor([lengths[i] for i in order]), how)
    torch.testing.assert_close(permuted, torch.cat([weights[i] for i in order]))
