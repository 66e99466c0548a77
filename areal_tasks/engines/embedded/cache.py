"""The key-value cache of all slots, allocated once: `[slots, heads, length, dim]` per layer; attention over it.

transformers sees an ordinary `Cache`; `set_window` determines what the next forward pass writes and reads.

Attention uses plain matrix products, like scaled-dot-product attention's math backend, whose results do not depend
bitwise on the slot (the CPU flash backend's do), but it scales the queries rather than the whole cache and does not
copy keys for grouped queries, which saves a third of a decode pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from schemas.errors import UserError

#: The name by which transformers finds `slot_attention`.
ATTENTION: Final = "arealflow_slots"
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")


@dataclass
class Window:
    """What the next forward pass writes, `positions` of `rows`, and reads: the first `length` positions of `read`."""

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
        """Write the window's new positions; returns all keys and values that it reads."""
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
    """The layers' caches of `rows` sequences of at most `length` tokens; `config`: the model's."""

    def __init__(self, config: Any, rows: int, length: int, dtype: torch.dtype) -> None:
        nothing = torch.zeros((0, 1), dtype=torch.int64)
        self.window = Window(nothing, nothing, slice(0), 0)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (rows, heads, length, dim)
        super().__init__(layers=[SlotLayer(self.window, shape, dtype) for _ in range(config.num_hidden_layers)])
        self._all = torch.arange(rows)[:, None]

    def set_window(self, rows: Int[Tensor, " n"] | None, positions: Int[Tensor, "n t"], length: int) -> None:
        """Have the next forward pass write `positions` of `rows` (None: the first n), and read their first `length`."""
        at = self.window
        at.rows = self._all[: len(positions)] if rows is None else rows[:, None]
        at.read = slice(len(positions)) if rows is None else rows
        at.positions, at.length = positions, length

    def copy(self, sources: Int[Tensor, " n"], targets: Int[Tensor, " n"], length: int) -> None:
        for layer in self.layers:
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def clear(self) -> None:
        """Zero the cache: a non-finite value would affect later sequences in spite of the mask."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()


def slot_attention(
    module: Any,
    query: Float[Tensor, "n heads t dim"],
    key: Float[Tensor, "n kv_heads length dim"],
    value: Float[Tensor, "n kv_heads length dim"],
    attention_mask: Float[Tensor, "n 1 t length"],
    scaling: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "n t heads dim"], None]:
    """softmax(q·kᵀ·scaling + mask)·v, the softmax in float32. Raises UserError for unsupported variants."""
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise UserError("its attention does not support this model's kind of it")
    n, heads, t, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = (query * (dim**-0.5 if scaling is None else scaling)).reshape(n, kv_heads, heads // kv_heads * t, dim)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).view(n, heads, t, length)
    weights = torch.softmax(scores.add_(attention_mask), dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(n, kv_heads, -1, length), value).view(n, heads, t, dim)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)
