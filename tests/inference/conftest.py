"""A tiny random Llama with a character vocabulary, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from areal_tasks.engines.embedded.engine import Engine
from tests.inference.helpers import MAX_LENGTH, VOCABULARY, make_engine


def make_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A Hugging Face folder: 2 layers, grouped key-value heads, weights large enough for varied outputs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": len(VOCABULARY),
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }
        | changes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token=VOCABULARY[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a", seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "b", seed=1)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def other_reference(other_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(other_folder, dtype=torch.float32).eval()


@pytest.fixture
def engine_of(model_folder: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(folder: Path = model_folder, **settings: Any) -> Engine:
        engines.append(make_engine(folder, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
