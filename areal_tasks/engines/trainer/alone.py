"""Compares a trainer with transformers on samples that it is about to train on, with the weights that it has loaded.

In SFT no server computes the same tokens. The proof at load is in float32, on the CPU and with random weights; this is
the trainer's own device, precision and kernels: its passes against eager attention, one sample at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from areal_tasks.data.batching import Sequences, make_layout, make_sequences
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.objective import agreement, agreement_totals, differences
from areal_tasks.engines.trainer.proven import EAGER
from areal_tasks.engines.trainer.rows import Batch
from schemas.errors import UserError
from schemas.recipe.training import Trainer

SAMPLES: Final = 4  # of each rank
TOKENS: Final = 128  # of each sample: enough for a packed pass, little for eager attention
#: On average: rounding gives 1e-7 to 1e-5 in float32, and hundredths in bfloat16 (as of two engines: see `objective`).
MOST_NATS: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
log = logging.getLogger(__name__)


def check_alone(backend: LocalBackend, batch: Batch, settings: Trainer) -> None:
    """Compare some samples of a batch; all ranks together. UserError: logprobs differ by more than MOST_NATS."""
    mine = beginnings(batch)
    count = len(mine.lengths)
    found = backend.score(make_layout(mine, torch.arange(count), settings.layout), 1.0, "policy", last=False).logprobs
    with eager_attention(backend.models["policy"]):
        layouts = [make_layout(mine, torch.arange(count)[i : i + 1], "padded") for i in range(SAMPLES)]
        scores = [backend.score(one, 1.0, "policy", one is layouts[-1]).logprobs for one in layouts]
    totals = agreement_totals(differences(found, torch.cat(scores)))
    tokens, gaps, largest, outside = backend.of_ranks(torch.tensor(totals, dtype=torch.float64)).tolist()
    gap = agreement(sum(tokens), sum(gaps), float(np.max(largest)), sum(outside))
    bound = MOST_NATS[backend.dtype]
    if gap["logprob_gap_mean"] > bound:
        raise UserError(
            f"the trainer and transformers disagree: over {sum(tokens):.0f} tokens, each sample alone, their logprobs "
            f"differ by {gap['logprob_gap_mean']:.4g} nats on average ({bound:g} is allowed). No step was made. "
            "Try another trainer.layout, trainer.compile=false, or model.dtype=float32"
        )
    if backend.rank == 0 and not math.isnan(gap["logprob_gap_mean"]):
        log.info("trainer and transformers differ by %.2g nats on average", gap["logprob_gap_mean"])


def beginnings(batch: Batch) -> Sequences:
    """The first tokens of this rank's first samples, all of which count."""
    rows = batch.rows[:SAMPLES]
    lengths = batch.lengths[rows].clamp(max=TOKENS)
    starts = batch.sequences.starts[rows]
    pieces = [batch.sequences.input_ids[at : at + n] for at, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    ids: Tensor = torch.cat([torch.zeros(0, dtype=torch.int64), *pieces]).long()
    return make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), lengths)


@contextmanager
def eager_attention(policy: Any) -> Iterator[None]:
    """Inside, the policy (or DeepSpeed's engine of it) attends as transformers does, and nothing is compiled."""
    config = getattr(policy, "module", policy).model.config
    before = config._attn_implementation
    config._attn_implementation = EAGER
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        config._attn_implementation = before
