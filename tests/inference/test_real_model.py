"""The engine against transformers on a real model and real prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LIMIT

from areal_tasks.engines.embedded.sequence import SamplingParams, make_sequence
from areal_tasks.engines.ends import end_tokens
from tests.inference.helpers import Running, full_logprobs, greedy_reference, make_engine

MODEL, DATA = os.environ.get("AREAL_TEST_MODEL"), os.environ.get("AREAL_TEST_GSM8K")
NEW_TOKENS, PROMPTS = 16, 20


@pytest.mark.skipif(not MODEL, reason="AREAL_TEST_MODEL names no model folder")
@pytest.mark.skipif(not DATA, reason="AREAL_TEST_GSM8K names no folder with train.jsonl and test.jsonl")
def test_greedy_tokens_and_logprobs_on_gsm8k() -> None:
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    lines = (Path(str(DATA)) / "test.jsonl").read_text().splitlines()[:PROMPTS]
    chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    engine = make_engine(Path(str(MODEL)), slots=PROMPTS, max_length=512, threads=os.cpu_count() or 1)
    eos = end_tokens(engine.runner.model.config, engine.runner.model.generation_config, tokenizer)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0)
    sequences = [make_sequence(p, params, eos, 512) for p in prompts]
    done = Running(engine, sequences).wait(LIMIT)
    for sequence in done:
        assert sequence.output == greedy_reference(model, sequence.prompt, NEW_TOKENS)
        expected = full_logprobs(model, sequence.prompt, sequence.output, 0)
        errors = (torch.tensor(sequence.logprobs) - expected).abs()
        assert errors.mean() <= 1e-5
        assert errors.max() <= 2e-5  # over 30 layers, transformers' own eager and sdpa attention differ by 1.2e-5
    engine.close()
