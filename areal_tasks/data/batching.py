"""Divides samples into optimizer steps and forward passes: minibatches, micro-batches and their layout in memory.

All functions are pure. Samples are concatenated sequences of unequal length (`Sequences`); a forward pass is a
`Layout`: the cell of each token, and the positions that predict the tokens that count. Padding is identified by
position, never by token id: a pad id may equal the end-of-sequence id.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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
    tokens: int  # positions the model computes, padding left out
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
    kind = kind if len(rows) else "packed"
    lengths = (sequences.lengths[rows] - 1).clamp(min=0)
    height, width = _shape(lengths, kind)
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
        tokens=len(cells),
        bounds=_bounds(lengths, width) if kind == "packed" else None,
        longest=1 << (int(lengths.max()) - 1).bit_length() if len(cells) else 1,
    )


def _shape(lengths: Int[Tensor, " n"], kind: LayoutKind) -> tuple[int, int]:
    """Rows and columns; at least one column, since models take no empty input."""
    width = int(lengths.sum() if kind == "packed" else lengths.max())
    return (1 if kind == "packed" else len(lengths)), max(width, 1)


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
    found = torch.empty_like(order)
    falling = _DescendingLengths(ordered.tolist(), ordered.cumsum(0).tolist())
    for number, (begin, end) in enumerate(_runs(falling, budget, kind, multiple_of)):
        found[order[begin:end]] = number
    return found


class _DescendingLengths(NamedTuple):
    """Lengths of samples in descending order, and their running sum."""

    lengths: list[int]
    ends: list[int]


def _runs(ordered: _DescendingLengths, budget: int, kind: LayoutKind, multiple_of: int) -> list[tuple[int, int]]:
    """The first and the last + 1 sample of each run, with samples in descending order of length.

    The smallest budget that needs no more runs than `budget` does balances them. Until their number is a multiple of
    `multiple_of`, the run with most samples is halved.
    """
    wanted = _rounded_up(len(_cut(ordered, budget, kind)), multiple_of, len(ordered.lengths))
    cuts = _cut(ordered, _smallest_cap(ordered, budget, kind, wanted), kind)
    while len(cuts) < wanted:
        begin, end = max(cuts, key=lambda cut: cut[1] - cut[0])
        at = cuts.index((begin, end))
        cuts[at : at + 1] = [(begin, (begin + end) // 2), ((begin + end) // 2, end)]
    return cuts


def _rounded_up(number: int, multiple_of: int, most: int) -> int:
    """The next multiple of `multiple_of`; `number` itself if that exceeds `most`."""
    rounded = -(-number // multiple_of) * multiple_of
    return rounded if rounded <= most else number


def _smallest_cap(ordered: _DescendingLengths, budget: int, kind: LayoutKind, wanted: int) -> int:
    """The smallest budget, up to `budget`, that needs no more than `wanted` runs."""
    low, high = 0, budget
    while wanted > 1 and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(ordered, middle, kind)) <= wanted else (middle, high)
    return high


def _cut(ordered: _DescendingLengths, cap: int, kind: LayoutKind) -> list[tuple[int, int]]:
    """Cut samples in descending order of length into runs that cost at most `cap` each (or hold one sample)."""
    samples, begin = len(ordered.lengths), 0
    cuts: list[tuple[int, int]] = []
    while begin < samples:
        end = min(max(_end_of_run(ordered, begin, cap, kind), begin + 1), samples)
        cuts.append((begin, end))
        begin = end
    return cuts


def _end_of_run(ordered: _DescendingLengths, begin: int, cap: int, kind: LayoutKind) -> int:
    width = ordered.lengths[begin]
    if kind == "padded":
        return begin + cap // max(width, 1)
    return bisect_right(ordered.ends, ordered.ends[begin] - width + cap)
