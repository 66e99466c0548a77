"""Proves, before a trainer loads a model, that its passes compute each sample as transformers computes it alone.

Layers may bypass the attention that separates packed samples, or have convolutions or states beside it; old ones are
not even causal with it. Then transformers' own eager attention may be right, since some models make its masks from the
position ids. It takes memory for tokens × tokens of a pass, so it is the second choice.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import LayoutKind, make_layout, make_sequences
from areal_tasks.engines.shallow import (
    BOUND,
    beginning,
    confirmed,
    largest_gap,
    logprobs_alone,
    shallow_model,
    with_other_ends,
)
from areal_tasks.engines.trainer.attention import NAME
from areal_tasks.engines.trainer.policy import Policy
from schemas.errors import UserError, first_line

EAGER: Final = "eager"
log = logging.getLogger(__name__)
_PROVEN: Final[
    dict[tuple[str, LayoutKind], str]
] = {}  # attention, by configuration: a trainer loads a model repeatedly


def proven_attention(config: Any, layout: LayoutKind) -> str:
    """The name of the attention with which passes of that layout are right. UserError: with none.

    It takes some hundredths of a second, in float32 on the CPU, whatever the backend: all ranks find the same.
    """
    key = config.to_json_string(use_diff=False), layout
    if key not in _PROVEN:
        _PROVEN[key] = _choose(config, layout)
    return _PROVEN[key]


def _choose(config: Any, layout: LayoutKind) -> str:
    problem = wrong(config, layout, NAME)
    if not problem:
        return NAME
    if not wrong(config, layout, EAGER):
        log.warning(
            "models of type %s attend by transformers' eager attention: its memory grows with the square of a pass's "
            "tokens (%s passes with the trainer's own attention: %s)", config.model_type, layout, problem,
        )  # fmt: skip
        return EAGER
    other: LayoutKind = "padded" if layout == "packed" else "packed"
    works = any(not wrong(config, other, attention) for attention in (NAME, EAGER))
    remedy = f"set trainer.layout to {other}, which is right for them" if works else "use another model"
    raise UserError(
        f"model.path: the trainer cannot train {config.model_type} models in {layout} passes: {problem}; {remedy}"
    )


def wrong(config: Any, layout: LayoutKind, attention: str) -> str:
    """What is wrong with a layout's passes of models like `config` with that attention; empty: nothing."""
    return confirmed(lambda texts: _problem(config, layout, attention, texts))


def _problem(config: Any, layout: LayoutKind, attention: str, texts: list[Int[Tensor, " _"]]) -> str:
    try:
        alone = logprobs_alone(shallow_model(config, EAGER), texts)
        policy = Policy(shallow_model(config, attention), len(alone))
        found, other = (_logprobs(policy, ids, layout) for ids in (texts, with_other_ends(texts)))
    except Exception as error:  # of code of any model
        return f"it fails ({first_line(error)})"
    if (gap := largest_gap(torch.cat(found), alone)) > BOUND:
        return f"a sample's logprobs differ by up to {gap:.2g} nats from those that transformers computes for it alone"
    counts = [beginning(text) - 1 for text in texts]  # of a sample's first tokens, without the very first
    earlier, same = (torch.cat([t[:n] for t, n in zip(each, counts, strict=True)]) for each in (found, other))
    if (gap := largest_gap(earlier, same)) > BOUND:
        return f"later tokens change the logprobs of earlier ones by up to {gap:.2g} nats: it is not causal"
    return ""


@torch.no_grad()
def _logprobs(policy: Policy, texts: list[Int[Tensor, " _"]], layout: LayoutKind) -> tuple[Float[Tensor, " _"], ...]:
    """Of each sample those of all tokens but the first."""
    ids, lengths = torch.cat(texts), torch.tensor([len(text) for text in texts])
    sequences = make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), lengths)
    found: Tensor = policy(make_layout(sequences, torch.arange(len(texts)), layout), 1.0).logprobs
    return torch.split(found, (lengths - 1).tolist())
