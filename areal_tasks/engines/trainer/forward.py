"""From a model and a layout to the log-probabilities of the tokens that count."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer.backend import Scores


def score_tokens(model: nn.Module, layout: Layout, temperature: float) -> Scores:
    """Logprobs and entropies of the counted tokens of `layout` at the sampling temperature."""
    return token_scores(predicting_logits(model, layout), layout.targets, temperature)


def predicting_logits(model: Any, layout: Layout) -> Float[Tensor, "T V"]:
    """Logits at the positions that predict counted tokens, and nowhere else.

    The positions are picked right before the output layer: with a large vocabulary the logits of prompts and padding
    would cost more than the transformer. Whatever the model does to its logits afterwards still happens.
    """

    def pick(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1).index_select(0, layout.predictors).unsqueeze(0), *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        output = model(input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False)
    finally:
        handle.remove()
    logits: Tensor = output.logits[0]
    return logits


def token_scores(logits: Float[Tensor, "T V"], targets: Int[Tensor, " T"], temperature: float) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution, in fp32 nats."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():  # the clamp keeps 0 · -inf, of a token that the model rules out, at 0
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)
