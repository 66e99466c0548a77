"""A causal model of one of the shapes over packed sequences of equal length: what the plain training step runs on."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.gpu.shapes import Shape

VARLEN = "benchmark_varlen"
_KNOWN = inspect.signature(varlen_attn).parameters  # they change between releases of torch
_FLAGS: dict[str, Any] = {
    **({"is_causal": True} if "is_causal" in _KNOWN else {"window_size": (-1, 0)}),
    **({"enable_gqa": True} if "enable_gqa" in _KNOWN else {}),
}


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence: [1, heads, tokens, width] in, [1, tokens, heads, width] out."""
    if not query.is_cuda:
        return _by_sequence(query, key, value, max_length_q, scaling), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.dtype == torch.float32:  # autocast leaves rotary positions in float32
        q, k, v = (x.bfloat16() for x in (q, k, v))
    assert cu_seq_lens_q is not None
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **_FLAGS)
    assert isinstance(out, Tensor)
    return out[None], None


def _by_sequence(query: Tensor, key: Tensor, value: Tensor, length: int, scaling: float | None) -> Tensor:
    """The same without the CUDA kernel: equal lengths, so the sequences are rows of a batch."""
    rows = [x[0].unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value)]
    out = scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[None]


AttentionInterface.register(VARLEN, varlen_attention)


def random_policy(shape: Shape, device: str, attention: str, dtype: torch.dtype) -> Any:
    """A model in training mode with random weights, without a cache."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape.config(use_cache=False, attn_implementation=attention), dtype=dtype
        )
    return model.train()


def compile_layers(model: Any) -> None:
    """torch.compile for each decoder layer: they share one compilation, and the step is as fast as compiled whole."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def packed_inputs(ids: Tensor) -> dict[str, Any]:
    """The model's arguments for rows `ids` [rows, length], end to end as one row."""
    rows, length = ids.shape
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=ids.device)
    return {
        "input_ids": ids.reshape(1, -1),
        "position_ids": torch.arange(length, device=ids.device).repeat(rows)[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": length,
        "max_length_k": length,
    }
