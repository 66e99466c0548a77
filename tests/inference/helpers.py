"""Shared by the tests of inference: running sequences through an engine, and checking them against a plain forward."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from waiting import LIMIT

from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.runner import Runner
from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence, make_sequence
from areal_tasks.engines.ends import Detokenizer
from areal_tasks.engines.models import load_tokenizer

VOCABULARY = ["<s>", "</s>", "<pad>", *"0123456789+=abcdefgh"]
MAX_LENGTH = 160
EOS = frozenset({1})


def make_engine(
    folder: Path, slots: int = 16, max_length: int = MAX_LENGTH, deterministic: bool = True, threads: int = 1
) -> Engine:
    torch.set_num_threads(threads)
    runner = Runner(folder, slots, max_length, torch.float32)
    detokenizer = Detokenizer(load_tokenizer(folder))
    engine = Engine(runner, slots, version="0", detokenizer=detokenizer, eos=EOS, deterministic=deterministic)
    engine.start()
    return engine


class Running:
    """Sequences under way in an engine."""

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self._done = engine.submit(sequences)

    @property
    def ended(self) -> bool:
        return self._done.done()

    def wait(self, seconds: float = LIMIT) -> list[Sequence]:
        self._done.result(seconds)
        return self.sequences


def make_sequences(prompt: Items[int], max_length: int = MAX_LENGTH, n: int = 1, **params: Any) -> list[Sequence]:
    """`n` sequences of one prompt, with seeds of their own."""
    first = params.pop("sampling_seed", None)
    seeds = [{} if first is None else {"sampling_seed": first + 1000 * i} for i in range(n)]
    return [make_sequence(list(prompt), SamplingParams(**params, **seed), EOS, max_length) for seed in seeds]


def submit(engine: Engine, prompt: Items[int], n: int = 1, **params: Any) -> Running:
    """Start one request of `n` sequences."""
    return Running(engine, make_sequences(prompt, engine.runner.max_length, n, **params))


def settle(engine: Engine) -> None:
    """Wait until the engine has gone round its loop some times, and begun whatever it is going to begin."""
    for _ in range(3):
        engine.abort(lambda sequence: False).result()


def complete(engine: Engine, prompt: Items[int], **params: Any) -> Sequence:
    """One finished sequence."""
    return submit(engine, prompt, **params).wait()[0]


def full_logprobs(model: Any, prompt: Items[int], output: Items[int], temperature: float) -> Tensor:
    """Logprobs of `output` by one forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def greedy_reference(model: Any, prompt: Items[int], max_new_tokens: int) -> list[int]:
    """The output of transformers.generate, greedy."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
        )
    return list(output[0, len(prompt) :].tolist())
