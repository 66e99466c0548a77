"""KL estimates against their definition, over all outcomes of a small categorical."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from areal_tasks.algorithms.log_ratios import k1, k3

LOGITS = st.lists(st.floats(-6, 6, width=32), min_size=4, max_size=4)
LOGPROB = st.floats(-50, 0, width=32)


def distribution(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(0)


def test_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(policy, reference).item() == pytest.approx(math.log(2))
    assert k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@given(LOGITS, LOGITS)
def test_expectation_under_the_policy_is_kl(policy_logits: list[float], reference_logits: list[float]) -> None:
    policy, reference = distribution(policy_logits), distribution(reference_logits)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum").item()
    for estimate in (k1, k3):
        assert (policy.exp() * estimate(policy, reference)).sum().item() == pytest.approx(exact, abs=1e-9)


@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative(policy: float, reference: float) -> None:
    assert k3(torch.tensor([policy]), torch.tensor([reference])).item() >= 0


def test_k3_is_accurate_where_the_policies_nearly_agree() -> None:
    """exp(d) - 1 - d in float32 would give 0 or noise; the value is d²/2."""
    assert k3(torch.tensor([0.0]), torch.tensor([1e-3])).item() == pytest.approx(5e-7, rel=1e-2)


def test_gradient_of_k3_is_one_minus_the_ratio() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0])
    k3(policy, reference).sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, 1 - (reference - policy.detach()).exp())


def test_shapes_are_checked() -> None:
    with pytest.raises(TypeCheckError):
        k1(torch.zeros(3), torch.zeros(4))
