"""Attention over the slots' cache in plain matrix products.

Like scaled-dot-product attention's math backend, whose bits do not depend on the slot (the CPU flash backend's do), but
it scales the queries rather than the whole cache and does not copy keys for grouped queries: a third off a decode pass.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from schemas.errors import UserError

NAME: Final = "arealflow_slots"
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")


def slot_attention(
    module: Any,
    query: Float[Tensor, "n heads t dim"],
    key: Float[Tensor, "n kv_heads length dim"],
    value: Float[Tensor, "n kv_heads length dim"],
    attention_mask: Float[Tensor, "n 1 t length"],
    scaling: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "n t heads dim"], None]:
    """softmax(q·kᵀ·scaling + mask)·v, the softmax in float32. Errors: UserError for variants of attention it lacks."""
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise UserError("the embedded server does not support this model's kind of attention; use the sglang engine")
    n, heads, t, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = (query * (dim**-0.5 if scaling is None else scaling)).reshape(n, kv_heads, heads // kv_heads * t, dim)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).view(n, heads, t, length)
    weights = torch.softmax(scores.add_(attention_mask), dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(n, kv_heads, -1, length), value).view(n, heads, t, dim)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)
