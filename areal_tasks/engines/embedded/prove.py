"""Deterministic mode: keep only the shapes whose rows are bitwise identical to those of the largest shape.

Which matrix kernels run, and from how many rows on they treat each row alike, is a property of the machine. So it is
measured at the start, with the running model: a smaller shape is used only if each row of its pass is bitwise identical
to that row in the pass of the largest. (With AVX-512 nearly all are; attention that reads 256 positions is not, since
the matrix library sums so many in another order.) Two layers suffice, since a model's layers have the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from areal_tasks.engines.embedded.runner import ROW_MULTIPLE, Runner, Shapes

LAYERS: Final = 2


def proven_shapes(runner: Runner) -> Shapes:
    """The shapes of `runner` that are bitwise equal to the largest. Uses the cache, and clears it."""
    old, positions = runner.shapes, min(16, runner.capacity)
    with _shallow(runner):
        rows = _keep(old.rows, lambda n: _decode(runner, torch.arange(n) % positions, old.lengths[-1]))
        lengths = [n for n in old.lengths[:-1] if _same_length(runner, n)] + old.lengths[-1:]
        prefill = {chunk: _proven_prefills(runner, chunk) for chunk in old.prefill_rows}
    return Shapes(rows, lengths, prefill)


@contextmanager
def _shallow(runner: Runner) -> Iterator[None]:
    """The model with its first layers only, over a cache full of noise."""
    config, generator = runner.model.config, torch.Generator().manual_seed(0)
    layers, config.num_hidden_layers = config.num_hidden_layers, min(LAYERS, config.num_hidden_layers)
    for layer in runner.cache.layers[:LAYERS]:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    yield
    config.num_hidden_layers = layers
    runner.cache.clear()


def _keep(sizes: list[int], run: Callable[[int], Tensor]) -> list[int]:
    """The sizes whose rows equal the same rows of the largest size."""
    largest = run(sizes[-1])
    return [n for n in sizes[:-1] if torch.equal(run(n), largest[:n])] + sizes[-1:]


def _proven_prefills(runner: Runner, chunk: int) -> list[int]:
    length = runner.shapes.lengths[-1]
    return _keep(runner.shapes.prefill_rows[chunk], lambda n: _prefill(runner, n, chunk, length, chunk))


def _same_length(runner: Runner, length: int) -> bool:
    """Whether reading `length` positions is bitwise equal to reading all, for sequences of various lengths up to it."""
    full, prefills = runner.shapes.lengths[-1], runner.shapes.prefill_rows
    positions = _spread(runner.rows, length - 1)
    return torch.equal(_decode(runner, positions, length), _decode(runner, positions, full)) and all(
        torch.equal(
            _prefill(runner, sizes[-1], chunk, length, length), _prefill(runner, sizes[-1], chunk, full, length)
        )
        for chunk, sizes in prefills.items()
    )


def _spread(n: int, last: int) -> Tensor:
    """n positions from 0 to `last`, the last one first."""
    return torch.linspace(last, 0, n).round().long() if n > 1 else torch.tensor([last])


def _decode(runner: Runner, positions: Tensor, length: int) -> Tensor:
    """Logits of as many rows as there are positions."""
    return runner.decode(torch.arange(len(positions)) % runner.vocab_size, positions, length)


def _prefill(runner: Runner, n: int, chunk: int, length: int, filled: int) -> Tensor:
    """Logits of n rows whose chunks end at positions up to `filled` (or at the first chunk's end)."""
    tokens = torch.arange(n * chunk).reshape(n, chunk) % runner.vocab_size
    starts = _spread(n, max(min(filled, runner.capacity) - chunk, 0))
    last = chunk - 1 - torch.arange(n) % ROW_MULTIPLE
    return runner.prefill(torch.arange(n), tokens, starts, last, min(max(length, chunk), runner.capacity))
