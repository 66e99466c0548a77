"""Deterministic mode: keep only those shapes that give a row the same bits as the largest one does.

Which matrix kernels a machine picks, and from how many rows on they treat each row alike, is a property of the
machine. So it is measured at the start, with the running model, rather than assumed: a pass of a smaller shape is used
only if it proves bit-equal, row by row, to the pass of the largest. (On AMD and Intel CPUs with AVX-512 all are.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from areal_tasks.engines.embedded.runner import ROW_MULTIPLE, Runner, Shapes


def proven_shapes(runner: Runner) -> Shapes:
    """The shapes of `runner` that are bit-equal to the largest. Fills the cache with noise and clears it again."""
    generator = torch.Generator().manual_seed(0)
    for layer in runner.cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    old = runner.shapes
    rows = _keep(old.rows, lambda n: _decode(runner, n, old.lengths[-1], 16))
    lengths = _keep_lengths(runner, old.lengths)
    prefill = {chunk: _keep(sizes, lambda n, c=chunk: _prefill(runner, n, c, old.lengths[-1], c))  # type: ignore[misc]
               for chunk, sizes in old.prefill_rows.items()}  # fmt: skip
    runner.cache.clear()
    return Shapes(rows, lengths, prefill)


def _keep(sizes: list[int], run: Callable[[int], Tensor]) -> list[int]:
    """The sizes whose rows equal the same rows of the largest size."""
    largest = run(sizes[-1])
    return [n for n in sizes[:-1] if torch.equal(run(n), largest[:n])] + sizes[-1:]


def _keep_lengths(runner: Runner, lengths: list[int]) -> list[int]:
    """The lengths that give the bits of the full length, when decoding and in every chunk."""

    def same(length: int) -> bool:
        runs: list[Callable[[int], Tensor]] = [lambda n: _decode(runner, ROW_MULTIPLE, n, length)]
        for c in runner.shapes.prefill_rows:
            runs.append(lambda n, c=c: _prefill(runner, 1, c, n, length))  # type: ignore[misc]
        return all(torch.equal(run(length), run(lengths[-1])) for run in runs)

    return [n for n in lengths[:-1] if same(n)] + lengths[-1:]


def _decode(runner: Runner, n: int, length: int, filled: int) -> Tensor:
    """Logits of n rows at positions just below `filled`."""
    index = torch.arange(n)
    return runner.decode(index % runner.vocab_size, filled - 1 - index % ROW_MULTIPLE, length)


def _prefill(runner: Runner, n: int, chunk: int, length: int, filled: int) -> Tensor:
    """Logits of n rows whose chunk ends at position `filled` (or at the chunk's end, where that is more)."""
    tokens = torch.arange(n * chunk).reshape(n, chunk) % runner.vocab_size
    starts = torch.full((n,), max(filled - chunk, 0))
    rows = torch.arange(n).clamp(max=runner.spare_row)
    reach = min(max(length, chunk), runner.capacity)
    return runner.prefill(rows, tokens, starts, chunk - 1 - torch.arange(n) % ROW_MULTIPLE, reach)
