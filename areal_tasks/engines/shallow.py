"""Small models of a configuration, and what transformers itself computes with them: the measure of an engine's start.

An engine has ways of its own to compute a model: samples packed into one row, caches of many sequences. Layers that do
not know them compute something else, silently: they attend to other samples or to later tokens, or carry a state over.
So before an engine loads a model, it computes a few short samples with a small one of the same kind, and compares them
with transformers' eager attention, one sample at a time. (What can be seen there: tests/trainer/test_causal_families.py
has the differences of about 160 families.)

The small model has the layers that mix positions as they are, in float32 and with random weights. What works on each
position alone is narrow: vocabulary and MLPs. It ends with the first layer after which no new kind of layer comes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging

from areal_tasks.engines.empty import empty_model, replace_parameters, with_memory
from schemas.errors import UserError

#: A larger difference of logprobs in nats is not rounding. Of about 160 families, right ones differ by up to 5e-6 (fp32
#: sums in another order), wrong ones by 2e-2 to 5.
BOUND: Final = 1e-3
VOCABULARY: Final = 64
NARROW: Final = 64  # hidden features of an MLP
WINDOW: Final = 8  # positions that layers with a window see: fewer than the samples have
LEAST_LAYERS: Final = 2
_NOISE: Final = 100_003  # numbers that are repeated, for speed; a prime, so that no two rows of a matrix are equal
LENGTHS: Final = torch.tensor([13, 9, 20])
_CPU: Final = torch.device("cpu")
CONTEXT: Final = 64  # positions: more than the samples have
_CONTEXTS: Final = ("max_position_embeddings", "n_positions")
_MLPS: Final = ("ffn_dim", "n_inner", "block_ff_dim")
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "index_topk")
_COUNTS: Final = ("idx", "index", "layer_id", "layer_number")  # in names of attributes that number layers


def read_config(folder: Any) -> Any:
    """The configuration of the model in a Hugging Face folder. UserError: its weights are quantised."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise UserError(f"the weights in {folder} are quantised and cannot be trained; name those they were made of")
    return config


@torch.no_grad()
def shallow_model(config: Any, attention: str, windows: bool = True) -> Any:
    """A small model of the kind of `config`, the same at each call; `windows`: layers with one see few positions."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # remarks on kernels that are not installed belong to the model itself
    try:
        model = empty_model(_narrowed(copy.deepcopy(config), windows), attention)
    finally:
        logging.set_verbosity(verbosity)
    _cut(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _randomise(model)
    return model


def _narrowed(config: Any, windows: bool) -> Any:
    for name, value in list(vars(config).items()):
        if type(value) is not int:
            continue
        if "vocab_size" in name:
            setattr(config, name, VOCABULARY)
        elif "intermediate_size" in name or name in _MLPS:
            setattr(config, name, min(value, NARROW))
        elif name in _WINDOWS and windows:
            setattr(config, name, min(value, WINDOW))
        elif name in _CONTEXTS:
            setattr(config, name, max(value, CONTEXT))
        elif name == "pad_token_id":
            config.pad_token_id = 0
    text = config.get_text_config(decoder=True)
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            _narrowed(part, windows)
            if part is not text and hasattr(part, "num_hidden_layers"):  # of images or sounds
                part.num_hidden_layers = 1
    return config


def _cut(model: Any) -> None:
    """Leave out the layers after the last new kind of one."""
    config = model.config.get_text_config(decoder=True)
    every: int = config.num_hidden_layers
    for module in model.modules():
        for name, layers in module.named_children():
            if isinstance(layers, nn.ModuleList) and len(layers) == every:
                types = getattr(config, "layer_types", None) or [""] * every
                kinds = [(_kind(layer), of_type) for layer, of_type in zip(layers, types, strict=False)]
                last = max(kinds.index(kind) for kind in kinds) + 1
                config.num_hidden_layers = max(last, min(LEAST_LAYERS, every))
                setattr(module, name, layers[: config.num_hidden_layers])
                return


def _kind(layer: nn.Module) -> Any:
    """What distinguishes a layer from others: the classes of its modules, and their settings."""
    return [(name, type(module).__name__, _settings(module)) for name, module in layer.named_modules()]


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return {name: value for name, value in plain.items() if not any(word in name for word in _COUNTS)}


def _randomise(model: Any) -> None:
    """Vectors as the model's class initialises them; matrices such that every layer has an effect on the next."""
    replace_parameters(model, lambda p: with_memory(p, _CPU, p.dtype) if p.ndim < 2 else p)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    for vector in vectors:  # in case that the class leaves them out
        vector.normal_(1.0, 0.02)
    model.apply(model._init_weights)
    noise = torch.randn(_NOISE)
    replace_parameters(model, lambda p: _matrix(p, noise) if p.is_meta else p)


def _matrix(like: nn.Parameter, noise: Float[Tensor, " n"]) -> nn.Parameter:
    """A parameter of that shape, with noise that maps vectors to ones of about the same length."""
    count, start = like.numel(), int(torch.randint(len(noise), ()))
    repeated = noise.repeat(-(-(start + count) // len(noise)))[start : start + count]
    return nn.Parameter(repeated.view(like.shape) * like.shape[-1] ** -0.5)


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def samples(seed: int, lengths: Int[Tensor, " B"] = LENGTHS) -> list[Int[Tensor, " _"]]:
    """Random tokens that a model with this vocabulary has, without the first few, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths.tolist()]


def confirmed(problem: Callable[[list[Int[Tensor, " _"]]], str]) -> str:
    """A problem that two sets of samples have, in the second one's words; else empty.

    With one of them a token may be so close to two experts of a mixture that rounding decides.
    """
    return problem(samples(0)) and problem(samples(1))


def with_other_ends(texts: Iterable[Int[Tensor, " _"]]) -> list[Int[Tensor, " _"]]:
    """The samples with other tokens after `beginning`, and more of them: some models depend on the length."""
    return [torch.cat([text[: beginning(text)], 4 + (text - 3) % (VOCABULARY - 4)]) for text in texts]


def beginning(text: Int[Tensor, " _"]) -> int:
    """The number of tokens that a sample has in common with the one that `with_other_ends` makes of it."""
    return len(text) * 2 // 3


@torch.no_grad()
def logprobs_alone(model: Any, texts: Iterable[Int[Tensor, " _"]]) -> Float[Tensor, " T"]:
    """Logprobs in nats of all tokens but the first of each sample, which transformers computes for it by itself."""
    found = list[Tensor]()
    for text in texts:
        logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
        found.append(torch.log_softmax(logits.float(), -1).gather(-1, text[1:, None])[:, 0])
    return torch.cat(found)


def largest_gap(one: Float[Tensor, " T"], other: Float[Tensor, " T"]) -> float:
    """The largest difference in nats; infinite if one is not finite."""
    return float((one - other).abs().nan_to_num(nan=torch.inf).max())
