"""Log-probabilities: the right position, the right temperature, and no sequence sees another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from areal_tasks.data.batching import Layout, LayoutKind, Sequences, make_layout, make_sequences
from areal_tasks.engines.trainer.forward import to_device, token_scores
from areal_tasks.engines.trainer.head import Scores
from areal_tasks.engines.trainer.policy import Policy

LENGTHS = torch.tensor([7, 1, 12, 3, 9])
KINDS: list[LayoutKind] = ["packed", "padded"]


def _models() -> list[Any]:
    torch.manual_seed(0)
    common = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return [
        LlamaForCausalLM(LlamaConfig(**common, **heads)).eval(),
        Qwen2ForCausalLM(Qwen2Config(**common, **heads, tie_word_embeddings=True)).eval(),
    ]


MODELS = _models()


def _sequences(seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (int(LENGTHS.sum()),), generator=generator)
    return make_sequences(ids, torch.rand(len(ids), generator=generator) < 0.7, LENGTHS)


def score_tokens(model: Any, layout: Layout, temperature: float) -> Scores:
    return Policy(model, 16)(to_device(layout, torch.device("cpu")), temperature)


def _plain(model: Any, sequences: Sequences, temperature: float) -> torch.Tensor:
    """Each sample by itself through the model, in full; logprob of token i from the logits at i - 1."""
    found = []
    for start, length in zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True):
        ids = sequences.input_ids[start : start + length]
        logits = model(input_ids=ids[None]).logits[0]
        for i in range(length):
            if sequences.counted[start + i]:
                found.append(torch.log_softmax(logits[i - 1] / temperature, -1)[ids[i]])
    return torch.stack(found)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_each_sample_alone(model: Any, kind: LayoutKind, temperature: float) -> None:
    sequences = _sequences()
    with torch.no_grad():
        expected = _plain(model, sequences, temperature)
        found = score_tokens(model, make_layout(sequences, torch.arange(5), kind), temperature)
    assert len(expected) > 10
    torch.testing.assert_close(found.logprobs, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_sequence_sees_another(model: Any, kind: LayoutKind) -> None:
    """Other tokens in the neighbours leave a sample's logprobs bitwise as they were."""
    sequences = _sequences()
    before = score_tokens(model, make_layout(sequences, torch.arange(5), kind), 1.0).logprobs
    layout = make_layout(sequences, torch.arange(5), kind)
    for sample in range(5):
        begin, end = int(sequences.starts[sample]), int(sequences.starts[sample] + LENGTHS[sample])
        others = (sequences.input_ids + 5) % 16
        others[begin:end] = sequences.input_ids[begin:end]
        changed = Sequences(others, sequences.counted, sequences.starts, LENGTHS)
        own = layout.samples == sample
        laid = make_layout(changed, torch.arange(5), kind)
        same_targets = Layout(laid.input_ids, laid.position_ids, *_cells(layout))
        assert torch.equal(score_tokens(model, same_targets, 1.0).logprobs[own], before[own])


def _cells(layout: Layout) -> tuple[torch.Tensor, ...]:
    return layout.predictors, layout.targets, layout.where, layout.samples


@torch.no_grad()
def test_what_fills_the_padding_does_not_matter(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    layout = make_layout(_sequences(), torch.arange(5), "padded")
    padding = torch.arange(layout.input_ids.shape[1])[None] >= LENGTHS[:, None] - 1
    filled = layout.input_ids.masked_fill(padding, 15)
    assert padding.any()
    other = Layout(filled, None, *_cells(layout))
    assert torch.equal(score_tokens(model, layout, 1.0).logprobs, score_tokens(model, other, 1.0).logprobs)


def test_tokens_equal_to_the_pad_token_count_like_any_other(tiny: Path) -> None:
    """SmolLM2's pad is its end-of-sequence token: its logprob must be learnt, so nothing may go by the id."""
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    pad = model.config.pad_token_id or 0
    ids = torch.tensor([5, 6, pad, 7, 8, 9, pad, pad])
    sequences = make_sequences(ids, torch.ones(8, dtype=torch.bool), torch.tensor([3, 5]))
    with torch.no_grad():
        expected = _plain(model, sequences, 1.0)
        for kind in KINDS:
            found = score_tokens(model, make_layout(sequences, torch.arange(2), kind), 1.0).logprobs
            assert found.shape == (6,)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_entropy_in_closed_form() -> None:
    uniform = token_scores(torch.zeros(2, 8), torch.tensor([0, 7]), 0.5)
    torch.testing.assert_close(uniform.entropy, torch.full((2,), 8.0).log())
    torch.testing.assert_close(uniform.logprobs, -torch.full((2,), 8.0).log())
    ruled_out = token_scores(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]), 1.0)
    torch.testing.assert_close(ruled_out.entropy, torch.tensor([2.0]).log())
