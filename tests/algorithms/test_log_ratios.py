"""Log-ratios of any size give finite losses and gradients; those within the bound stay bitwise as they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.behaviour import Bound, behaviour_weights
from areal_tasks.algorithms.log_ratios import MAX_LOG_RATIO, any_above, bounded, k3
from areal_tasks.algorithms.losses import policy_terms

CLIP = 0.2
TOP = math.exp(MAX_LOG_RATIO)
FAR = (-1000.0, -89.0, 89.0, 1000.0)
NATS = st.floats(-1e4, 1e4, width=32)
WITHIN = st.floats(-1e4, 20, width=32)
ADVANTAGE = st.floats(-100, 100, width=32)


def surrogate(log_ratio: float, advantage: float, limit: float = MAX_LOG_RATIO) -> tuple[float, float, bool]:
    """Loss, gradient and clipped of one token whose policy and proximal policy differ by `log_ratio`."""
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    terms = policy_terms(logprobs, torch.zeros(1), torch.tensor([advantage]), CLIP, limit)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    return terms.loss.item(), gradient.item(), bool(terms.clipped)


def penalty(log_r: float, limit: float = MAX_LOG_RATIO) -> tuple[float, float]:
    """k3 and its gradient with respect to the policy's logprob, where reference and policy differ by `log_r`."""
    logprobs = torch.tensor([-log_r], requires_grad=True)
    value = k3(logprobs, torch.zeros(1), limit)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "clipped"),
    [
        (1000.0, 2.0, -2 * (1 + CLIP), True),  # NaN without a bound: 0 · inf
        (89.0, 2.0, -2 * (1 + CLIP), True),
        (1000.0, 0.0, 0.0, False),  # NaN loss without a bound
        (1000.0, -2.0, 2 * TOP, False),
        (-1000.0, 2.0, 0.0, False),
        (-1000.0, -2.0, 2 * (1 - CLIP), True),
    ],
)
def test_the_surrogate_of_a_far_token_by_hand(log_ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    """No gradient: the clip cuts it off, the bound does, or the ratio is 0."""
    found = surrogate(log_ratio, advantage)
    assert found[0] == pytest.approx(loss, rel=1e-5) and found[1:] == (0.0, clipped)


@pytest.mark.parametrize(
    ("log_r", "value", "gradient"),
    [
        (1000.0, TOP - 1 - MAX_LOG_RATIO, 0.0),
        (89.0, TOP - 1 - MAX_LOG_RATIO, 0.0),
        (-89.0, 89.0 - 1, 1.0),  # a policy that has left the reference behind is still pulled back
        (-1000.0, 1000.0 - 1, 1.0),
    ],
)
def test_k3_of_a_far_token_by_hand(log_r: float, value: float, gradient: float) -> None:
    assert penalty(log_r) == pytest.approx((value, gradient), rel=1e-5)


@given(NATS, ADVANTAGE)
def test_every_loss_and_gradient_is_finite(log_ratio: float, advantage: float) -> None:
    found = (*surrogate(log_ratio, advantage)[:2], *penalty(log_ratio))
    assert all(math.isfinite(number) for number in found)


@given(WITHIN, ADVANTAGE)
def test_what_is_within_the_bound_is_the_same_to_the_bit(log_ratio: float, advantage: float) -> None:
    assert surrogate(log_ratio, advantage) == surrogate(log_ratio, advantage, math.inf)
    assert penalty(log_ratio) == penalty(log_ratio, math.inf)
    pair = torch.tensor([log_ratio]), torch.zeros(1)
    near, free = (behaviour_weights(pair[0], Bound("cap", 2.0), limit).applied for limit in (MAX_LOG_RATIO, math.inf))
    assert torch.equal(near, free)
    assert not any_above(MAX_LOG_RATIO, pair[0]).any()


@pytest.mark.parametrize("far", FAR)
def test_the_weight_of_a_far_token_is_the_cap_or_nothing(far: float) -> None:
    weight = behaviour_weights(torch.tensor([far]), Bound("cap", 2.0)).applied.item()
    assert weight == pytest.approx(2.0 if far > 0 else 0.0, abs=1e-30)


def test_without_a_bound_a_clipped_token_has_no_gradient_to_speak_of() -> None:
    """What runs that were recorded before the bound computed, and the defect that it removes."""
    assert math.isnan(surrogate(89.0, 2.0, math.inf)[1])
    assert math.isnan(surrogate(1000.0, 0.0, math.inf)[0])


def test_a_token_counts_once_whichever_of_its_log_ratios_is_too_large() -> None:
    first, second = torch.tensor([0.0, 21.0, 21.0, -50.0]), torch.tensor([20.0, 0.0, 99.0, math.inf])
    assert any_above(MAX_LOG_RATIO, first, second).tolist() == [False, True, True, True]
    assert not any_above(math.inf, first, second).any()


def test_what_is_no_number_stays_none() -> None:
    found = bounded(torch.tensor([math.nan, math.inf, -math.inf]), MAX_LOG_RATIO)
    assert found[0].isnan() and found[1:].tolist() == [MAX_LOG_RATIO, -math.inf]
