"""Random-weights models of known shapes, with a tokenizer that works: nothing is downloaded.

    python -m benchmarks.gpu.shapes FOLDER [135m 0.5b 1.5b 7b]     (each goes to FOLDER/<shape>)

Every id decodes to text, so that whatever such a model samples makes the round trip through the pipeline.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PEAK_BF16: Final = 989e12  # dense bf16 FLOP/s of a Hopper SXM part, by its data sheet
CHAT: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The numbers that decide what a training step costs."""

    family: str  # llama or qwen2
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    theta: float
    words: int = 48_000  # of the tokenizer that are learnt, at most; the rest are made up

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The Hugging Face configuration; embeddings are tied, as in the three smaller models."""
        make = LlamaConfig if self.family == "llama" else Qwen2Config
        return make(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=16384,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=True,
            initializer_range=self.hidden**-0.5,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=2,
            dtype="bfloat16",
            **changes,
        )

    @property
    def parameters(self) -> int:
        """Trained numbers, the tied embedding once."""
        width = self.hidden // self.heads
        attention = self.hidden * width * (2 * self.heads + 2 * self.kv_heads)
        biases = width * (self.heads + 2 * self.kv_heads) if self.family == "qwen2" else 0
        layer = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def flops(self, length: int) -> float:
        """FLOPs a trained token at sequences of `length`: 6·parameters + 6·layers·hidden·length (causal attention)."""
        return 6.0 * self.parameters + 6.0 * self.layers * self.hidden * length


SHAPES: Final = {
    "135m": Shape("llama", 576, 30, 9, 3, 1536, 49_152, 1e5),
    "0.5b": Shape("qwen2", 896, 24, 14, 2, 4864, 151_936, 1e6),
    "1.5b": Shape("qwen2", 1536, 28, 12, 2, 8960, 151_936, 1e6),
    "7b": Shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 1e6),  # tied, unlike Qwen2.5-7B's: 7.07 G parameters
    "tiny": Shape("qwen2", 64, 2, 4, 2, 96, 512, 1e4, words=480),  # for tests on a CPU
}


def mfu(shape: Shape, tokens_per_second: float, length: int, peak: float = PEAK_BF16) -> float:
    """Share of the chip's dense bf16 rate that training at `tokens_per_second` uses."""
    return tokens_per_second * shape.flops(length) / peak


def make_shape(name: str, folder: Path, tokenizer: Tokenizer | None = None, seed: int = 0) -> Path:
    """Write the model `name` as a Hugging Face folder, in bf16; a complete folder is left alone."""
    if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
        return folder
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tokenizer or learn_tokenizer(shape.words), shape.vocabulary)
    random_model(shape, seed).save_pretrained(folder)
    return folder


def random_model(shape: Shape, seed: int) -> Any:
    """Random weights, drawn on the GPU where there is one (a CPU takes a minute at 1.5 B). Its memory is then freed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.to("cpu")
    torch.cuda.empty_cache()
    return model


def corpus(characters: int = 3_000_000) -> Iterator[str]:
    """Text that every machine with Python has: its standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        characters -= len(text)
        yield text
        if characters <= 0:
            return


def learn_tokenizer(words: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `words` ids, single digits kept apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def made_up_words() -> Iterator[str]:
    """A blank and four letters each, as byte-level BPE spells them."""
    return ("Ġ" + "".join(letters) for letters in itertools.product(ascii_lowercase, repeat=4))


def write_tokenizer(folder: Path, learnt: Tokenizer, vocabulary: int) -> None:
    """The tokenizer's files, with made-up words of usual length up to `vocabulary` ids, which are only ever decoded."""
    saved = json.loads(learnt.to_str())
    words = saved["model"]["vocab"]
    fresh = (word for word in made_up_words() if word not in words)
    for number in range(len(words), vocabulary):
        words[next(fresh)] = number
    (folder / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False))
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "unk_token": SPECIAL[0], "pad_token": SPECIAL[2]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings, indent=1))
    (folder / "special_tokens_map.json").write_text(json.dumps(named))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", default=["135m", "0.5b", "1.5b"], help=f"of {', '.join(SHAPES)}")
    arguments = parser.parse_args()
    learnt: dict[int, Tokenizer] = {}
    for name in arguments.shapes:
        started, words = time.perf_counter(), SHAPES[name].words
        learnt.setdefault(words, learn_tokenizer(words))
        make_shape(name, arguments.folder / name, learnt[words])
        print(
            f"{arguments.folder / name}: {SHAPES[name].parameters / 1e6:.0f} M, {time.perf_counter() - started:.1f} s"
        )


if __name__ == "__main__":
    main()
