"""Proves, before the embedded server serves a model, that its cache changes nothing of what transformers computes."""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.engines.embedded.cache import ATTENTION
from areal_tasks.engines.embedded.runner import Passes
from areal_tasks.engines.shallow import BOUND, VOCABULARY, confirmed, largest_gap, logprobs_alone, shallow_model
from schemas.errors import UserError, first_line

#: Positions of the chunks in which prompts are computed; the tokens after these are decoded one by one.
CHUNKS: Final = (8, 4)
_UNKNOWN: Final = 1.0  # no logprob, and no NaN, which a wrong pass may give


def check_decode(config: Any) -> None:
    """UserError if the server's logprobs of models like `config` are wrong. Takes some hundredths of a second."""
    if problem := confirmed(lambda texts: _problem(config, texts)):
        raise UserError(
            f"the embedded server cannot serve {config.model_type} models: {problem}; use inference.engine: sglang"
        )


def _problem(config: Any, texts: list[Int[Tensor, " _"]]) -> str:
    try:
        passes = Passes(shallow_model(config, ATTENTION, windows=False), len(texts), max(map(len, texts)))
        found = _logprobs(passes, texts)
        alone = logprobs_alone(shallow_model(config, "eager", windows=False), texts)
        known = found != _UNKNOWN
        gap = largest_gap(found[known], alone[known])
    except Exception as error:  # of code of any model
        return f"it fails ({first_line(error)})"
    return f"logprobs differ by up to {gap:.2g} nats from those of transformers" if gap > BOUND else ""


@torch.inference_mode()
def _logprobs(passes: Passes, texts: list[Int[Tensor, " _"]]) -> Float[Tensor, " T"]:
    """Those of all tokens but the first of each sample; _UNKNOWN inside the chunks.

    Samples that end amid a chunk or before others, and free rows, are filled with other tokens, which must not matter.
    """
    width = passes.capacity + 1
    ids = torch.randint(VOCABULARY, (passes.rows, width), generator=torch.Generator().manual_seed(1))
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    scores = torch.full((passes.rows, width), _UNKNOWN)
    rows = torch.arange(len(texts))
    start = 0
    for chunk in CHUNKS:
        last = torch.full_like(rows, chunk - 1)
        logits = passes.prefill(rows, ids[rows, start : start + chunk], rows * 0 + start, last, passes.capacity)
        start += chunk
        scores[rows, start] = _chosen(logits, ids[rows, start])
    for at in range(start, passes.max_length - 1):
        logits = passes.decode(ids[:, at], torch.full((passes.rows,), at), passes.capacity)
        scores[:, at + 1] = _chosen(logits, ids[:, at + 1])
    return torch.cat([scores[row, 1 : len(text)] for row, text in enumerate(texts)])


def _chosen(logits: Float[Tensor, "n vocab"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None])[:, 0]
