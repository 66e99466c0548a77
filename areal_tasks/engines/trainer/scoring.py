"""The part of a batch that servers score after an iteration in which too few tokens measured their agreement.

With η > 0 nearly all tokens may be of older weights than the trainer's. Then the trainer scores the beginnings of some
completions under the weights that the iteration made, and stage `publish` has servers score them once they hold these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from areal_tasks.data.batching import Sequences, make_sequences
from areal_tasks.engines.trainer.rows import LEAST_COMPARED, TEXT, make_table
from areal_tasks.store.shards import read_files
from schemas.tables import TABLES

#: Tokens of a sample that are scored, so that several samples are, and the logits of few positions take memory.
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
    def sequences(self) -> Sequences:
        """The samples, of which the tokens to score count."""
        lengths = torch.tensor([len(ids) for ids in self.input_ids], dtype=torch.int64)
        masks = [torch.arange(len(ids)) >= first for ids, first in zip(self.input_ids, self.scored_from, strict=True)]
        tokens = torch.tensor([token for ids in self.input_ids for token in ids], dtype=torch.int32)
        return make_sequences(tokens, torch.cat([torch.zeros(0, dtype=torch.bool), *masks]), lengths)


def read_part(files: Sequence[Path], most: int) -> Part:
    """The first samples of a rollout with `LEAST_COMPARED` tokens to score, of each up to its token number `most`."""
    sizes = read_files("rollout", files, ("sample_id", "num_generated"))
    tokens = np.minimum(sizes["num_generated"].to_numpy(), MOST_OF_SAMPLE).cumsum()
    ids = sizes["sample_id"].slice(0, int(np.searchsorted(tokens, LEAST_COMPARED)) + 1).combine_chunks()
    rows = read_files("rollout", files, TEXT, ids).to_pylist()
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


def scored_table(part: Part | None, version: int, logprobs: Float[Tensor, " N"]) -> pa.Table:
    """The table `scored` from the flat logprobs of the part's tokens under `version`; empty without a part."""
    if part is None:
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
