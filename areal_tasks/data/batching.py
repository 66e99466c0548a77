"""Divides samples into optimizer steps and forward passes: minibatches, micro-batches and their layout in memory.

All functions are pure. Samples are concatenated sequences of unequal length (`Sequences`); a forward pass is a
`Layout`: the cell of each token, and the positions that predict the tokens that count. Padding is identified by
position, never by token id: a pad id may equal the end-of-sequence id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from areal_tasks.data.sampler import GOLDEN, mix64

LayoutKind = Literal["packed", "padded"]

#: The minibatch and micro-batch of a sample that is left out of training.
LEFT_OUT: Final = -1
#: The start of a sample whose tokens another rank holds.
ON_ANOTHER_RANK: Final = -1


@dataclass(frozen=True)
class Sequences:
    """Concatenated samples: `starts[b]` is where sample b begins in the flat columns. Build with `make_sequences`."""

    input_ids: Int[Tensor, " N"]
    counted: Bool[Tensor, " N"]
    starts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]


@dataclass(frozen=True)
class Layout:
    """One forward pass over some samples; `T` is the number of tokens that count."""

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"] | None  # None: each row is one sample, left-aligned
    predictors: Int[Tensor, " T"]  # cell (row · L + column) whose logits predict each counted token
    targets: Int[Tensor, " T"]  # the counted tokens
    where: Int[Tensor, " T"]  # their index in the flat columns
    samples: Int[Tensor, " T"]  # the sample each belongs to
    bounds: Int[Tensor, " S"] | None = None  # packed: where each sample starts in the row and the last one ends, int32
    longest: int = 0  # no sample between bounds is longer; a power of two, so that few values occur


def make_sequences(
    input_ids: Int[Tensor, " N"], loss_mask: Bool[Tensor, " N"], lengths: Int[Tensor, " B"]
) -> Sequences:
    """Concatenated samples. The first token of a sample never counts: no token before it predicts it."""
    starts = lengths.cumsum(0) - lengths
    counted = loss_mask.clone()
    counted[starts[lengths > 0]] = False
    return Sequences(input_ids, counted, starts, lengths)


def in_whole_batch(sequences: Sequences, rows: Int[Tensor, " b"], lengths: Int[Tensor, " B"]) -> Sequences:
    """The tokens of this rank's samples `rows` with the numbering of a batch whose samples have these lengths."""
    starts = torch.full_like(lengths, ON_ANOTHER_RANK)
    starts[rows] = sequences.starts
    return Sequences(sequences.input_ids, sequences.counted, starts, lengths)


def counted_tokens(sequences: Sequences, rows: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """How many tokens of each of the samples `rows` count."""
    total = torch.cat([torch.zeros(1, dtype=torch.int64), sequences.counted.cumsum(0)])
    starts = sequences.starts[rows]
    return total[starts + sequences.lengths[rows]] - total[starts]


def spans(starts: Int[Tensor, " B"], lengths: Int[Tensor, " B"]) -> Int[Tensor, " N"]:
    """The numbers start … start + length - 1 of every span, concatenated."""
    shift = starts - (lengths.cumsum(0) - lengths)
    repeated = shift.repeat_interleave(lengths)
    return repeated + torch.arange(repeated.numel())


def make_layout(sequences: Sequences, rows: Int[Tensor, " n"], kind: LayoutKind) -> Layout:
    """Lay out the samples `rows` for one forward pass: packed into one row, or one row each, padded on the right.

    Padding on the right needs no mask: under causal attention no token sees what follows it. Packed samples are
    separated by their position ids, which start at 0 in each. The last token of a sample predicts none: it is omitted.
    Without rows, the pass has one cell of padding, and no token counts.
    """
    lengths = (sequences.lengths[rows] - 1).clamp(min=0)
    height = 1 if kind == "packed" else max(len(rows), 1)
    width = max(int(lengths.sum() if kind == "packed" or not len(rows) else lengths.max()), 1)  # no input is empty
    first = lengths.cumsum(0) - lengths if kind == "packed" else torch.arange(len(rows)) * width
    cells = spans(first, lengths)
    flat = spans(sequences.starts[rows], lengths)
    ids = torch.zeros(height * width, dtype=torch.int64)
    ids[cells] = sequences.input_ids[flat].long()
    counted = sequences.counted[flat + 1]  # of the token that each position predicts
    where = flat[counted] + 1
    return Layout(
        input_ids=ids.view(height, width),
        position_ids=_positions(lengths, width) if kind == "packed" else None,
        predictors=cells[counted],
        targets=sequences.input_ids[where].long(),
        where=where,
        samples=rows.repeat_interleave(lengths)[counted],
        bounds=_bounds(lengths, width) if kind == "packed" else None,
        longest=1 << (int(lengths.max()) - 1).bit_length() if len(cells) else 1,
    )


def _positions(lengths: Int[Tensor, " n"], width: int) -> Int[Tensor, "1 L"]:
    """The position of each cell of a packed row within its sample."""
    return torch.cat([spans(torch.zeros_like(lengths), lengths), torch.zeros(width, dtype=torch.int64)])[None, :width]


def _bounds(lengths: Int[Tensor, " n"], width: int) -> Int[Tensor, " S"]:
    """Where the samples of a packed row start and end, without empty ones; a row of padding alone is one sample."""
    taken = lengths[lengths > 0] if lengths.any() else torch.tensor([width])
    return torch.cat([torch.zeros(1, dtype=torch.int64), taken.cumsum(0)]).to(torch.int32)


def minibatches(kept: Bool[Tensor, " B"], count: int, seed: int, iteration: int) -> Int[Tensor, " B"]:
    """The minibatch of each sample: kept samples are shuffled by (seed, iteration) and divided equally.

    Sizes differ by at most one. A sample that is not kept gets `LEFT_OUT`. Groups are not kept together.
    """
    state = mix64((mix64(seed - GOLDEN) ^ iteration) - GOLDEN)
    rows = torch.nonzero(kept)[:, 0]
    numbers = mix64(rows.numpy().astype(np.uint64) * GOLDEN + state)  # SplitMix64's
    order = rows[torch.argsort(torch.from_numpy(numbers.view(np.int64)), stable=True)]
    found = torch.full((len(kept),), LEFT_OUT, dtype=torch.int64)
    found[order] = torch.arange(len(rows)) * count // max(len(rows), 1)
    return found


def micro_batches(lengths: Int[Tensor, " n"], budget: int, kind: LayoutKind, multiple_of: int = 1) -> Int[Tensor, " n"]:
    """The micro-batch of each sample: as few as the token budget allows, and as equal in cost as possible.

    Their number is rounded up to a multiple of `multiple_of`, unless there are too few samples for it.

    A padded micro-batch costs its rows times its longest sample, so samples of similar length go together. A sample
    that exceeds the budget alone gets a micro-batch of its own.
    """
    ordered, order = lengths.sort(descending=True, stable=True)
    first = torch.zeros_like(order)
    first[_runs(ordered.tolist(), budget, kind, multiple_of)] = 1
    found = torch.empty_like(order)
    found[order] = first.cumsum(0) - 1
    return found


def _runs(ordered: list[int], budget: int, kind: LayoutKind, multiple_of: int) -> list[int]:
    """The first sample of each run, with samples in descending order of length.

    The smallest budget that needs no more runs than `budget` does balances them. Until their number is a multiple of
    `multiple_of`, the run with most samples is halved.
    """
    cut = partial(_cut, ordered, [0, *accumulate(ordered)], kind)
    fewest = len(cut(budget))
    rounded = -(-fewest // multiple_of) * multiple_of
    wanted = rounded if rounded <= len(ordered) else fewest
    firsts = cut(_smallest_cap(lambda cap: len(cut(cap)), budget, fewest, wanted)) if wanted > 1 else [0] * wanted
    largest = [(first - end, first) for first, end in pairwise([*firsts, len(ordered)])]  # of these, the least tuple
    heapify(largest)
    while len(largest) < wanted:
        size, first = -largest[0][0], largest[0][1]
        heapreplace(largest, (-(size // 2), first))
        heappush(largest, (size // 2 - size, first + size // 2))
    return sorted(first for _, first in largest)


def _smallest_cap(runs_of: Callable[[int], int], budget: int, fewest: int, wanted: int) -> int:
    """The smallest budget, up to `budget`, that needs no more than `wanted` runs; `budget` needs the `fewest`.

    Tries few budgets: runs times budget hardly changes, and a plateau of equal numbers is left by growing steps.
    """
    low, high, step = 0, budget, budget // wanted + 1
    cap = budget * fewest // wanted
    while high - low > 1:
        cap = min(max(cap, low + 1), high - 1)
        runs = runs_of(cap)
        if runs <= wanted:
            low, high, cap = low, cap, max(cap * runs // wanted - step, (low + cap) // 2)
        else:
            low, high, cap = cap, high, min(cap * runs // wanted + step, (cap + high) // 2)
        step *= 2
    return high


def _cut(ordered: list[int], ends: list[int], kind: LayoutKind, cap: int) -> list[int]:
    """The first samples of runs that cost at most `cap` each (or hold one sample). `ends`: 0 and the running sum."""
    firsts, first, size = [], 0, 1
    while first < len(ordered):
        firsts.append(first)
        if kind == "padded":
            size = max(cap // max(ordered[first], 1), 1)
        else:  # at least as many samples as in the run before, none of which is shorter
            limit = ends[first] + cap
            while first + size < len(ordered) and ends[first + size + 1] <= limit:
                size += 1
        first += size
    return firsts
