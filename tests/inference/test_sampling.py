"""Sampling: the hash, the inverse CDF and the definition of a logprob."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.engines.embedded.sequence import sample, uniforms


def draw(seeds: list[int], positions: list[int]) -> np.ndarray:
    return uniforms(np.array(seeds, np.int64), np.array(positions, np.int64))


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    by_seed = draw(list(range(20_000)), [7] * 20_000)
    by_position = draw([7] * 20_000, list(range(20_000)))
    for numbers in (by_seed, by_position):
        histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((histogram - 1000) ** 2 / 1000).sum() < 45  # χ² with 19 degrees of freedom: p < .001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_a_uniform_depends_on_its_own_row_only(seed: int, position: int) -> None:
    alone = draw([seed], [position])
    among = draw([3, seed, 5], [1, position, 2])
    assert 0 <= alone[0] < 1
    assert among[1] == alone[0]


def test_tokens_come_with_their_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).repeat(40_000, 1)
    uniform = torch.from_numpy(draw(list(range(40_000)), [0] * 40_000))
    tokens, logprobs = sample(logits, torch.full((40_000,), 0.7), uniform)
    expected = torch.softmax(logits[0] / 0.7, dim=0)
    frequencies = torch.bincount(tokens, minlength=4) / 40_000
    assert torch.allclose(frequencies, expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_the_inverse_cdf_is_exact_at_its_edges() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).repeat(4, 1)
    tokens, _ = sample(logits, torch.ones(4), torch.tensor([0.0, 0.2499, 0.2501, 0.9999], dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 1, 2]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    tokens, _ = sample(logits, torch.ones(3), torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3, 3]


def test_greedy_rows_stand_beside_sampled_ones_with_logprobs_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    tokens, logprobs = sample(logits, torch.tensor([0.0, 2.0]), torch.tensor([0.99, 0.0], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs[0], torch.log_softmax(logits[0], 0)[1])
    assert torch.allclose(logprobs[1], torch.log_softmax(logits[1] / 2, 0)[0])
