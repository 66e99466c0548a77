"""The embedded engine with the shortest contexts that a recipe allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from areal_tasks.engines.embedded.engine import Engine
from tests.inference.helpers import complete, full_logprobs, greedy_reference, submit

EngineOf = Callable[..., Engine]
SHORTEST = 8  # model.max_length


@pytest.mark.parametrize("max_length", [SHORTEST, 9, 15, 16, 17])
def test_a_context_may_be_shorter_than_a_prefill(
    engine_of: EngineOf, reference: LlamaForCausalLM, max_length: int
) -> None:
    engine = engine_of(slots=16, max_length=max_length)
    for length in (1, max_length // 2, max_length - 1):
        prompt = [3 + (5 * i) % 17 for i in range(length)]
        sequence = complete(engine, prompt, temperature=0, max_new_tokens=max_length - length)
        expected = greedy_reference(reference, prompt, max_length - length)
        assert sequence.output == expected
        assert torch.allclose(
            torch.tensor(sequence.logprobs), full_logprobs(reference, prompt, expected, 1.0), atol=1e-5
        )


def test_neighbours_do_not_change_the_bits_there(engine_of: EngineOf) -> None:
    engine = engine_of(slots=16, max_length=SHORTEST)
    asked = [[3 + start, 5, 9][: 1 + start % 3] for start in range(6)]
    alone = [complete(engine, prompt, max_new_tokens=5, sampling_seed=7) for prompt in asked]
    together = [submit(engine, prompt, max_new_tokens=5, sampling_seed=7) for prompt in asked]
    for one, running in zip(alone, together, strict=True):
        [other] = running.wait()
        assert (other.output, other.logprobs) == (one.output, one.logprobs)
