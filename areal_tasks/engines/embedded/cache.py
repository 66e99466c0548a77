"""The key-value cache of all slots, allocated once: `[slots, heads, length, dim]` per layer.

transformers sees an ordinary `Cache`; which rows and positions a forward pass writes and reads is set before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Window:
    """What the next forward pass touches: it writes `positions` of `rows`, and reads `length` positions of `read`."""

    rows: Tensor
    positions: Tensor
    read: slice | Tensor
    length: int


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, window: Window, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.window = window
        self.keys: Tensor = torch.zeros(shape, dtype=dtype)
        self.values: Tensor = torch.zeros(shape, dtype=dtype)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is allocated when it is made."""

    def update(
        self, key_states: Float[Tensor, "n h t d"], value_states: Float[Tensor, "n h t d"], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the window's new positions; give back all that its rows hold."""
        at = self.window
        self.keys[at.rows, :, at.positions] = key_states.transpose(1, 2)
        self.values[at.rows, :, at.positions] = value_states.transpose(1, 2)
        return self.keys[at.read, :, : at.length], self.values[at.read, :, : at.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name before transformers 5.13


class SlotCache(Cache):  # type: ignore[misc]
    """The layers' caches of `rows` sequences of at most `length` tokens."""

    def __init__(self, layers: int, rows: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> None:
        nothing = torch.zeros((0, 1), dtype=torch.int64)
        self.window = Window(nothing, nothing, slice(0), 0)
        shape = (rows, heads, length, dim)
        super().__init__(layers=[SlotLayer(self.window, shape, dtype) for _ in range(layers)])
        self._all = torch.arange(rows)[:, None]

    def aim(self, rows: Int[Tensor, " n"] | None, positions: Int[Tensor, "n t"], length: int) -> None:
        """The next forward pass writes `positions` of `rows` (None: the first n) and reads their first `length`."""
        at = self.window
        at.rows = self._all[: len(positions)] if rows is None else rows[:, None]
        at.read = slice(len(positions)) if rows is None else rows
        at.positions, at.length = positions, length

    def copy(self, sources: Int[Tensor, " n"], targets: Int[Tensor, " n"], length: int) -> None:
        """Copy the first `length` positions of rows `sources` to rows `targets`."""
        for layer in self.layers:
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def clear(self) -> None:
        """Forget everything: a value that is not finite would outlive its sequence behind the mask."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()
