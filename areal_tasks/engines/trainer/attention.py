"""Causal attention of a training pass, without padding, and without length × length masks but for sliding windows.

Packed samples are separated by their bounds: on a GPU in one variable-length kernel (FlashAttention-2, Dao,
arXiv:2307.08691), elsewhere sample by sample. Registered with transformers under `NAME`.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from schemas.errors import UserError

NAME: Final = "arealflow_training"
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
_VARLEN: Final[Any] = varlen_attn  # its signature changes between releases of torch
#: The kernel accepts fewer key heads than query heads; later releases of torch need this option for it.
_GROUPED: Final = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_HALF: Final = (torch.bfloat16, torch.float16)


def training_attention(
    module: Any,
    query: Float[Tensor, "n heads length dim"],
    key: Float[Tensor, "n kv_heads length dim"],
    value: Float[Tensor, "n kv_heads length value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Int[Tensor, " bounds"] | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Float[Tensor, "n length heads value_dim"], None]:
    """Transformers' interface; with `cu_seq_lens_q`, of one row of packed samples. UserError if not supported."""
    if attention_mask is not None or any(options.get(name) is not None for name in _UNSUPPORTED):
        raise UserError(f"the trainer's attention does not support this model's kind of it ({type(module).__name__})")
    if cu_seq_lens_q is None:
        mixed = causal(query, key, value, scaling, sliding_window)
    elif query.is_cuda and query.dtype in _HALF:
        mixed = in_one_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        mixed = one_by_one(query, key, value, cu_seq_lens_q, scaling, sliding_window)
    return mixed.transpose(1, 2).contiguous(), None


def in_one_kernel(
    query: Float[Tensor, "1 heads length dim"],
    key: Float[Tensor, "1 kv_heads length dim"],
    value: Float[Tensor, "1 kv_heads length value_dim"],
    bounds: Int[Tensor, " bounds"],
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "1 heads length value_dim"]:
    """Causal attention within samples: sample i is bounds[i] to bounds[i + 1] (exclusive), of length ≤ `longest`."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1
    out: Tensor = _VARLEN(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **_GROUPED)
    return out.transpose(0, 1)[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def one_by_one(
    query: Float[Tensor, "1 heads length dim"],
    key: Float[Tensor, "1 kv_heads length dim"],
    value: Float[Tensor, "1 kv_heads length value_dim"],
    bounds: Int[Tensor, " bounds"],
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "1 heads length value_dim"]:
    """As `in_one_kernel`, one sample at a time: no kernel supports fp32 samples of unequal length together."""
    lengths = bounds.diff().tolist()
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([causal(q, k, v, scaling, window) for q, k, v in parts], dim=2)


def causal(
    query: Float[Tensor, "n heads length dim"],
    key: Float[Tensor, "n kv_heads length dim"],
    value: Float[Tensor, "n kv_heads length value_dim"],
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "n heads length value_dim"]:
    """Every position attends to itself and earlier ones, at most `window` in total."""
    length, mask = query.shape[2], None
    if window is not None and length > window:
        at = torch.arange(length, device=query.device)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind < window)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(NAME, training_attention)
