"""A real model's folder: needs AREAL_TEST_MODEL (a Llama or Qwen folder with its tokenizer)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from trainer_builders import rlhf_recipe
from transformers import AutoTokenizer

from areal_tasks.data.batching import LayoutKind, make_layout, make_sequences
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.settings import read_settings

TEXTS = ["The capital of France is Paris.", "2 + 2 = 4<|im_end|>", "A train leaves at nine and arrives at noon."]


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    if "AREAL_TEST_MODEL" not in os.environ:
        pytest.skip("AREAL_TEST_MODEL names no model folder")
    settings = read_settings(rlhf_recipe())
    found = LocalBackend(settings.trainer, settings.model)
    found.load(Path(os.environ["AREAL_TEST_MODEL"]), 0)
    return found


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_logprobs_are_those_of_a_plain_forward_pass(backend: LocalBackend, kind: LayoutKind) -> None:
    tokenizer = AutoTokenizer.from_pretrained(os.environ["AREAL_TEST_MODEL"])
    texts = [tokenizer(text).input_ids for text in TEXTS]
    lengths = torch.tensor([len(t) for t in texts])
    ids = torch.tensor([i for t in texts for i in t])
    sequences = make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), lengths)
    found = backend.score(make_layout(sequences, torch.arange(3), kind), 1.0, "policy").logprobs
    expected = []
    for text in texts:
        own = torch.tensor(text)
        with torch.no_grad():
            logits = backend.models["policy"].model(input_ids=own[None]).logits[0, :-1]
        expected.append(torch.log_softmax(logits, -1).gather(-1, own[1:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
