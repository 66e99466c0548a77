"""Choosing the next token: one uniform number per token from a counter-based hash, inverse CDF in float64.

A token depends only on its own row of logits, its sequence's seed and its position: never on a generator's state.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, from the sequence's seed and the new token's position in the sequence.

    The position, not the count of generated tokens: a sequence continued from partial output gets the same numbers.
    """
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(stream + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Float[Tensor, "n vocab"], temperature: Float[Tensor, " n"], uniform: Float[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Tokens and their log-probabilities, log_softmax(logits / temperature) over the whole vocabulary.

    Temperature 0 is greedy; its log-probabilities are taken at temperature 1.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    tokens = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        tokens = torch.where(greedy, tokens, _inverse_cdf(logprobs, uniform))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: Float[Tensor, "n vocab"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The first token whose cumulative probability exceeds `uniform` times the total: never one of probability 0."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
