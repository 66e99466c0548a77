"""Compares a compiled policy with a plain one over passes of several lengths; prints what it found as JSON.

Through the compiler's front end and its automatic differentiation, with symbols for lengths; without its code
generator, which takes a minute on a CPU.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen2Config

from areal_tasks.data.batching import make_layout, make_sequences
from areal_tasks.engines.trainer.attention import NAME
from areal_tasks.engines.trainer.forward import to_device
from areal_tasks.engines.trainer.policy import Policy, prepare
from schemas.recipe.training import Trainer

PASSES = ([9, 5, 12, 14], [17, 30, 3], [23, 24, 5, 6, 40], [11, 60])
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}


def make_policy(compiled: bool) -> Policy:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    return prepare(Policy(model, 16, compiled), Trainer(compile=compiled, gradient_checkpointing=compiled))


def learn(policy: Policy, lengths: list[int], kind: Any) -> Tensor:
    """The gradient of a cross-entropy over random samples, flat."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, SIZES["vocab_size"], (sum(lengths),), generator=generator)
    samples = make_sequences(ids, torch.rand(len(ids), generator=generator) < 0.7, torch.tensor(lengths))
    layout = to_device(make_layout(samples, torch.arange(len(lengths)), kind), torch.device("cpu"))
    weights = torch.full((len(layout.targets),), 1 / len(layout.targets))
    total, _ = policy(layout, 0.7, weights, lambda logprobs, entropy, _part: torch.stack([-logprobs, entropy]))
    policy.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def main() -> None:
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    plain, compiled = make_policy(False), make_policy(True)
    difference, graphs = 0.0, []
    for lengths in PASSES:
        gap = learn(compiled, lengths, "padded") - learn(plain, lengths, "padded")
        difference = max(difference, gap.abs().max().item())
        graphs.append(counters["stats"]["unique_graphs"])
    json.dump({"difference": difference, "graphs_after_first_pass": graphs[0], "graphs": graphs[-1]}, sys.stdout)


if __name__ == "__main__":
    main()
