"""A small, randomly initialised character-level Llama, written as a complete Hugging Face folder.

Every engine loads it like any other model: config, safetensors and tokenizer have their usual names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from schemas.recipe.sections import ScratchModel

PAD: Final = "<pad>"
BOS: Final = "<bos>"
EOS: Final = "<eos>"
UNK: Final = "<unk>"
_SPECIAL: Final = (PAD, BOS, EOS, UNK)


def make_scratch(spec: ScratchModel, seed: int, max_length: int, folder: Path) -> Path:
    """Write model and tokenizer into `folder` (created if absent) and return it. The seed determines the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(spec.alphabet, max_length)
    tokenizer.save_pretrained(folder)
    logging.disable_progress_bar()  # transformers shows one even for a file of two megabytes
    scratch_model(spec, len(tokenizer), seed, max_length).save_pretrained(folder)
    return folder


def character_tokenizer(alphabet: str, max_length: int) -> PreTrainedTokenizerFast:
    """One token per character; characters outside `alphabet` become `<unk>`. Adds no special tokens by itself."""
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *dict.fromkeys(alphabet)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def scratch_model(spec: ScratchModel, vocabulary: int, seed: int, max_length: int) -> LlamaForCausalLM:
    """Llama with tied embeddings, in float32; its weights are drawn without touching the process's random state."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=_SPECIAL.index(PAD),
        bos_token_id=_SPECIAL.index(BOS),
        eos_token_id=_SPECIAL.index(EOS),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()
