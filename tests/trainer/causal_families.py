"""A small configuration of each family of causal language models in transformers, with layers of all its kinds."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.trainer.families import COMMON, DEEPSEEK

_LAYERS: Final = 4
_MOST: Final = 130_000_000  # parameters
_TINY: Final[dict[str, Any]] = {
    **COMMON, "vocab_size": 64, "num_hidden_layers": _LAYERS, "hidden_size": 64, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip
_MLA: Final = {**DEEPSEEK, "head_dim": None}
_FEW: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: What the common settings lack, or have too much of.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "axk1": _MLA, "axk2": _MLA, "deepseek_v2": _MLA, "deepseek_v3": _MLA, "deepseek_v32": _MLA, "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA, "sarvam_mla": _MLA, "youtu": _MLA, "minicpm3": _MLA,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "dots1": {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "gpt_neo": {"num_layers": _LAYERS, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 64}, "hy_v3": _FEW, "kolibri1": _FEW,
    "inkling2_loop_text": {"unpadded_vocab_size": 64}, "inkling2_text": {"unpadded_vocab_size": 64},
    "falcon": {"head_dim": None}, "lara_mini": _FEW, "flint": _FEW,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bailing_hybrid": {"num_experts": 16, "moe_intermediate_size": 16},
    "hy_v4": {**_FEW, "n_routed_experts": 4}, "kimi_linear": _FEW, "qwen3_next": _FEW,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, **_FEW},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8},
    "recurrent_gemma": {"num_key_value_heads": 1, "attention_window_size": 8},
}  # fmt: skip
CAUSAL: Final = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """A small configuration of the family."""
    settings = {**_TINY, **_OWN.get(family, {})}
    return AutoConfig.for_model(family, **{name: value for name, value in settings.items() if value is not None})


def fits(family: str) -> bool:
    """Whether such a configuration gives a model, and a small one."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(family))
            model.get_input_embeddings()
    except Exception:  # the family needs settings, or packages, of its own
        return False
    return sum(parameter.numel() for parameter in model.parameters()) < _MOST
