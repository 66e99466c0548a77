"""Behaviour weights by hand and by their laws: capped, masked, of tokens and of sequences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.behaviour import (
    Bound,
    behaviour_weights,
    effective_sample_size,
    sequence_log_ratios,
)
from areal_tasks.algorithms.losses import policy_terms

LOG_RATIOS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8)
CAPS = st.floats(1, 50)
ICE_POP = Bound("mask", 5.0, 0.5)
WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def ess(weights: list[float]) -> float:
    return effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))


def test_the_decoupled_objective_by_hand() -> None:
    """AReaL, §5.2, in float64: E[π_prox/π_behav · min(u A, clip(u, 1-ε, 1+ε) A)] with u = π_θ/π_prox, ε = .2.

    π_θ is .6, .1, .3, .2; π_prox .4, .2, .3, .5; π_behav .5, .1, .6, .1; A is 1, -2, 3, 1.
    """
    policy = logs(0.6, 0.1, 0.3, 0.2).requires_grad_()
    proximal, behaviour = logs(0.4, 0.2, 0.3, 0.5), logs(0.5, 0.1, 0.6, 0.1)
    terms = policy_terms(policy, proximal, torch.tensor([1.0, -2.0, 3.0, 1.0], dtype=torch.float64), 0.2)
    weights = behaviour_weights(proximal - behaviour, Bound("cap", 1e6)).applied
    torch.testing.assert_close(weights, torch.tensor([0.8, 2.0, 0.5, 5.0], dtype=torch.float64))
    loss = weights * terms.loss
    expected = [-0.8 * 1.2, 2.0 * 2 * 0.8, -0.5 * 3.0, -5.0 * 0.4]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss.sum(), policy)  # -w · u · A where the clip does not decide
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -0.5 * 3.0, -5.0 * 0.4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("bound", "applied", "changed"),
    [
        (Bound("cap", 2.0), [0.25, 0.51, 1.0, 1.9, 2.0, 2.0], [0, 0, 0, 0, 1, 1]),
        (ICE_POP, [0.0, 0.51, 1.0, 1.9, 4.9, 0.0], [1, 0, 0, 0, 0, 1]),
    ],
)
def test_truncated_importance_sampling_and_ice_pop_by_hand(
    bound: Bound, applied: list[float], changed: list[int]
) -> None:
    weights = behaviour_weights(logs(0.25, 0.51, 1.0, 1.9, 4.9, 5.1), bound)
    torch.testing.assert_close(weights.applied, torch.tensor(applied, dtype=torch.float64))
    assert weights.bounded.tolist() == changed


@given(LOG_RATIOS, CAPS)
def test_a_capped_weight_is_the_ratio_up_to_its_cap(log_ratios: list[float], cap: float) -> None:
    weights = behaviour_weights(torch.tensor(log_ratios), Bound("cap", cap))
    for log_ratio, weight in zip(log_ratios, weights.applied.tolist(), strict=True):
        assert weight == pytest.approx(min(math.exp(log_ratio), cap), rel=1e-4)
        assert 0 <= weight <= torch.tensor(cap).item()


@given(LOG_RATIOS, CAPS, st.floats(0, 1))
def test_a_masked_weight_is_the_ratio_within_its_band_and_0_outside(
    log_ratios: list[float], high: float, low: float
) -> None:
    free = torch.tensor(log_ratios).clamp(max=20).exp()
    weights = behaviour_weights(torch.tensor(log_ratios), Bound("mask", high, low))
    assert torch.equal(weights.bounded, (free > high) | (free < low))
    assert torch.equal(weights.applied, torch.where(weights.bounded, 0.0, free))


@pytest.mark.parametrize("bound", [Bound("cap", 1.0), ICE_POP, Bound("mask", 1.0, 1.0)])
def test_the_weight_of_equal_policies_is_one_to_the_bit(bound: Bound) -> None:
    weights = behaviour_weights(torch.zeros(3), bound)
    assert weights.applied.tolist() == [1.0] * 3 and not weights.bounded.any()


@pytest.mark.parametrize("bound", [Bound("cap", 2.0), ICE_POP])
def test_weights_carry_no_gradient_and_hide_no_nan(bound: Bound) -> None:
    weights = behaviour_weights(torch.tensor([0.0, math.nan, math.inf], requires_grad=True), bound)
    assert not weights.applied.requires_grad
    assert weights.applied[1].isnan() and weights.applied[[0, 2]].tolist() == [1.0, 2.0 if bound.how == "cap" else 0.0]
    assert weights.bounded.tolist() == [False, False, True]


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens() -> None:
    """2 · 3 · ½ = 3 for the first, nothing for the second, ¼ for the third."""
    found = sequence_log_ratios(logs(2.0, 3.0, 0.5, 0.25), torch.tensor([3, 0, 1])).exp()
    torch.testing.assert_close(found, torch.tensor([3.0, 3.0, 3.0, 0.25], dtype=torch.float64))


@given(st.lists(st.lists(st.floats(-5, 5, width=32), max_size=6), min_size=1, max_size=5), st.randoms())
def test_the_order_of_sequences_does_not_matter(sequences: list[list[float]], random) -> None:
    order = random.sample(range(len(sequences)), len(sequences))

    def found(of: list[list[float]]) -> list[list[float]]:
        flat = torch.tensor([x for one in of for x in one], dtype=torch.float32)
        lengths = [len(one) for one in of]
        return [part.tolist() for part in sequence_log_ratios(flat, torch.tensor(lengths)).split(lengths)]

    assert [found(sequences)[i] for i in order] == found([sequences[i] for i in order])
    for one, told in zip(sequences, found(sequences), strict=True):
        assert told == pytest.approx([math.fsum(one)] * len(one), rel=1e-6, abs=1e-6)


@given(WEIGHTS)
def test_the_effective_sample_size_is_a_share(weights: list[float]) -> None:
    assert 0 < ess(weights) <= 1
    assert ess(weights) >= 1 / len(weights) * (1 - 1e-9)


@given(st.floats(1e-3, 1e3), st.integers(1, 50))
def test_equal_weights_count_fully(weight: float, count: int) -> None:
    assert ess([weight] * count) == pytest.approx(1.0)


def test_effective_sample_sizes_by_hand() -> None:
    assert ess([1.0, 1.0, 1.0, 1.0]) == 1.0
    assert ess([2.0, 1.0, 1.0]) == pytest.approx(16 / 18)
    assert ess([5.0, 0.0, 0.0, 0.0]) == 0.25 and ess([0.0, 0.0]) == 0.0
