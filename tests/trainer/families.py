"""Tiny models of many families, from their configurations alone, saved by transformers as their checkpoints are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

Tensors = dict[str, torch.Tensor]

COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: More than ten experts: their natural order is not that of their names.
EXPERTS: dict[str, Any] = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {},
    "olmo2": {},
}
MIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 12, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
}
#: Those whose checkpoints have other names than transformers' models, in all supported versions of it.
RENAMED = frozenset({"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "phimoe"})


def make_family(family: str, folder: Path, **changes: Any) -> Path:
    """Model and tokenizer of a family in `folder`; every tensor is random, so that none equals another."""
    settings = {**COMMON, **DENSE.get(family, {}), **MIXED.get(family, {}), **changes}
    save_random(AutoConfig.for_model(family, **settings), folder)
    save_tokenizer(folder, settings["vocab_size"])
    return folder


def save_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of so many tokens in `folder`."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, size)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def save_random(config: Any, folder: Path, buffers: bool = True) -> None:
    """A model of the configuration in `folder`; without random `buffers` it computes what its class intends."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values() if buffers else model.parameters():
            tensor.copy_(torch.randn(tensor.shape) / 8)
        if not buffers:
            model.get_input_embeddings().weight[config.pad_token_id or 0] = 0.0  # as some classes load it
    model.save_pretrained(folder)


def stored(folder: Path) -> Tensors:
    """The tensors of a checkpoint, of all its files."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(one: Tensors, other: Tensors) -> None:
    """The same names, types and values."""
    assert one.keys() == other.keys()
    assert not [n for n in one if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])]
