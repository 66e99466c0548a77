"""Log-probabilities of given tokens: of a rollout, and of the part of a batch that servers score as well.

Servers score a part after an iteration with too few tokens to measure whether they agree with the trainer: with η > 0
nearly all may be sampled by older weights. Then the trainer scores the beginnings of some completions under the weights
that the iteration made, and stage `publish` has servers that hold these weights score the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import LayoutKind, Sequences, in_whole_batch, make_layout, make_sequences, spans
from areal_tasks.engines.trainer.forward import ahead, staged
from areal_tasks.engines.trainer.learner import Work
from areal_tasks.engines.trainer.local import LocalBackend, Which
from areal_tasks.engines.trainer.plan import Plan, Rows, passes_of_rank, rank_of_samples, scoring_plan
from areal_tasks.engines.trainer.rows import LEAST_COMPARED, TEXT, make_table
from areal_tasks.engines.trainer.tables import SharedTables
from schemas.recipe.training import Trainer
from schemas.tables import TABLES

#: At most so many tokens of a sample are scored, so that several samples are, and the logits need little memory.
MOST_OF_SAMPLE: Final = 64
#: The temperature: inference servers do not apply one to the tokens of prompts.
TEMPERATURE: Final = 1.0


@dataclass(frozen=True)
class Part:
    """Samples up to the last token that is scored; the first one is at `scored_from`."""

    sample_ids: list[str]
    input_ids: list[list[int]]
    scored_from: list[int]

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        return torch.tensor([len(ids) for ids in self.input_ids], dtype=torch.int64)

    def sequences(self, rows: Rows) -> Sequences:
        """The tokens of the samples `rows`, of which those to score count."""
        own = [(self.input_ids[row], self.scored_from[row]) for row in rows.tolist()]
        tokens = torch.tensor([token for ids, _ in own for token in ids], dtype=torch.int32)
        masks = [torch.arange(len(ids)) >= first for ids, first in own]
        counted = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
        return in_whole_batch(make_sequences(tokens, counted, self.lengths[rows]), rows, self.lengths)


def read_part(tables: SharedTables, most: int) -> Part:
    """The first samples of a rollout with LEAST_COMPARED tokens to score, of each up to number `most`; on all ranks."""
    sizes = tables.read({"rollout": ("sample_id", "num_generated")})["rollout"]
    tokens = np.minimum(sizes["num_generated"].to_numpy(), MOST_OF_SAMPLE).cumsum()
    ids = sizes["sample_id"].slice(0, int(np.searchsorted(tokens, LEAST_COMPARED)) + 1).combine_chunks()
    rows = tables.read({"rollout": TEXT}, ids)["rollout"].to_pylist()
    found = [(row["sample_id"], *span) for row in rows if (span := _span(row, most)) is not None]
    return Part([name for name, _, _ in found], [ids for _, ids, _ in found], [first for _, _, first in found])


def _span(row: dict[str, Any], most: int) -> tuple[list[int], int] | None:
    """The tokens of a sample up to the last that is scored, and the position of the first; None if there is none.

    Scored are the first generated tokens that nothing else interrupts.
    """
    mask = [False, *row["loss_mask"][1:most]]  # no token before it predicts a sample's first
    if True not in mask:
        return None
    first = mask.index(True)
    run = mask[first : first + MOST_OF_SAMPLE]
    return row["input_ids"][: first + (run.index(False) if False in run else len(run))], first


def scored_table(part: Part | None, version: int, logprobs: Float[Tensor, " N"] | None) -> pa.Table:
    """The table `scored` from the flat logprobs of the part's tokens under `version`; empty without a part."""
    if part is None or logprobs is None:
        return TABLES["scored"].empty_table()
    whole = torch.split(logprobs, [len(ids) for ids in part.input_ids])
    columns = {
        "sample_id": part.sample_ids,
        "version": [version] * len(part.sample_ids),
        "input_ids": part.input_ids,
        "scored_from": part.scored_from,
        "scores": [each[first:].tolist() for each, first in zip(whole, part.scored_from, strict=True)],
    }
    return make_table("scored", columns)


def score(
    backend: LocalBackend, which: Which, temperature: float, mine: Sequences, plan: Plan, layout: LayoutKind, work: Work
) -> Float[Tensor, " N"] | None:
    """On the first rank: logprobs of the counted tokens of all samples, 0 at the others. Elsewhere none.

    `mine`: the tokens of this rank's samples; `plan`: of all ranks, whose only minibatch is scored.
    """
    passes = passes_of_rank(plan, 0, backend.rank, backend.world)
    scores, places = [torch.zeros(0, device=backend.device)], [torch.zeros(0, dtype=torch.int64)]
    layouts = (staged(make_layout(mine, rows, layout), backend.device) for rows in passes)
    with ahead(layouts, backend.device) as coming:
        for number, (rows, made) in enumerate(zip(passes, coming, strict=False), 1):
            scores.append(backend.score(made, temperature, which, number == len(passes)).logprobs)
            places.append(made.where)
            work.add(len(rows) * backend.world)
    flat = torch.zeros(len(mine.input_ids))
    flat[torch.cat(places)] = torch.cat(scores).cpu()
    return _on_first(flat, mine.lengths, rank_of_samples(plan, backend.world), backend)


def score_part(backend: LocalBackend, part: Part, trainer: Trainer, work: Work) -> Float[Tensor, " N"] | None:
    """On the first rank: logprobs of the tokens of a part under the policy. Elsewhere none."""
    plan = scoring_plan(part.lengths, trainer, backend.world)
    mine = part.sequences(torch.nonzero(rank_of_samples(plan, backend.world) == backend.rank)[:, 0])
    return score(backend, "policy", TEMPERATURE, mine, plan, trainer.layout, work)


def _on_first(
    mine: Float[Tensor, " n"], lengths: Int[Tensor, " B"], owners: Int[Tensor, " B"], backend: LocalBackend
) -> Float[Tensor, " N"] | None:
    """On the first rank: the values of all tokens, from those of the samples that each rank owns. Elsewhere none.

    Other ranks hold only their own; the first holds all of them and, at a time, those that one rank sends.
    """
    if backend.rank > 0:
        dist.send(mine, 0)
        return None
    whole, starts = mine.new_zeros(int(lengths.sum())), lengths.cumsum(0) - lengths
    samples = torch.split(owners.argsort(stable=True), torch.bincount(owners, minlength=backend.world).tolist())
    for rank, rows in enumerate(samples):
        at = spans(starts[rows], lengths[rows])
        values = mine if rank == 0 else mine.new_empty(len(at))
        if rank > 0:
            dist.recv(values, rank)
        whole[at] = values
    return whole
