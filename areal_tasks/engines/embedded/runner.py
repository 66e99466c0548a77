"""The model and its cache: forward passes for decode and prefill, weights replaced in place, bitwise safe shapes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_tasks.engines.embedded.cache import ATTENTION, SlotCache
from areal_tasks.engines.models import BUILDING, check_finite
from areal_tasks.engines.names import Names, stored_names
from schemas.errors import UserError

ROW_MULTIPLE: Final = 8  # below 8 rows a linear layer uses other kernels, which round differently
CHUNK: Final = 64  # positions of a long prompt computed at once
SHORT_CHUNK: Final = 16  # a prompt that fits in it is computed in one pass of this size
PREFILL_TOKENS: Final = 512  # positions of one prefill pass, over all its rows


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def chunk_of(prompt_length: int) -> int:
    """Positions that a pass over this prompt computes: a function of the prompt alone, so that its results are too."""
    return SHORT_CHUNK if prompt_length <= SHORT_CHUNK else CHUNK


def ladder(first: int, last: int) -> list[int]:
    """Sizes from `first` to `last`: `first` times powers of two, the integers halfway between these, and `last`."""
    powers = [first << i for i in range(32) if first << i < last]
    halves = [p + p // 2 for p in powers if p % 2 == 0 and p + p // 2 < last]
    return sorted({*powers, *halves, last})


@dataclass
class Shapes:
    """The sizes that passes are padded to, ascending; see `proven_shapes`."""

    rows: list[int]
    lengths: list[int]
    prefill_rows: dict[int, list[int]]  # by chunk

    @staticmethod
    def fit(sizes: list[int], need: int) -> int:
        """The smallest size that holds `need`."""
        return next(size for size in sizes if size >= need)


class Passes:
    """A causal language model with a cache row for each slot, and one more that padding rows write to."""

    def __init__(self, model: Any, slots: int, max_length: int) -> None:
        self.model = model
        self.max_length = _context(model.config, max_length)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.rows = round_up(slots, ROW_MULTIPLE)  # padding rows write to the row after these
        self.capacity = round_up(self.max_length, ROW_MULTIPLE)
        self.cache = SlotCache(model.config, self.rows + 1, self.capacity, model.dtype)
        self.shapes = Shapes(
            ladder(ROW_MULTIPLE, self.rows),
            ladder(32, self.capacity),
            {chunk: ladder(1, min(PREFILL_TOKENS // chunk, self.rows)) for chunk in (SHORT_CHUNK, CHUNK)},
        )
        self._range = torch.arange(self.capacity)
        takes = inspect.signature(self.model.forward).parameters  # newer versions warn of the older name in each pass
        self._given = {"cache" if "cache" in takes else "past_key_values": self.cache}

    def decode(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], length: int) -> Float[Tensor, "n vocab"]:
        """Logits after one more token in each of the first n rows; `length` bounds the positions that are read."""
        return self._forward(None, tokens[:, None], positions[:, None], length, 1)[:, 0]

    def prefill(
        self,
        rows: Int[Tensor, " n"],
        tokens: Int[Tensor, "n chunk"],
        starts: Int[Tensor, " n"],
        last: Int[Tensor, " n"],
        length: int,
    ) -> Float[Tensor, "n vocab"]:
        """Compute one chunk of each prompt from position `starts`; logits at offset `last` of the chunk.

        Padding after a prompt's end may write to the cache's last position, which no prompt reaches.
        """
        positions = (starts[:, None] + torch.arange(tokens.shape[1])).clamp_(max=self.capacity - 1)
        wanted, column = torch.unique(last, return_inverse=True)
        padding = wanted[:1].expand(round_up(len(wanted), ROW_MULTIPLE) - len(wanted))
        logits = self._forward(rows, tokens, positions, length, torch.cat([wanted, padding]))
        return logits[torch.arange(len(rows)), column]

    def _forward(
        self, rows: Tensor | None, tokens: Tensor, positions: Tensor, length: int, keep: int | Tensor
    ) -> Float[Tensor, "n kept vocab"]:
        self.cache.set_window(rows, positions, length)
        visible = self._range[:length] <= positions[:, None, :, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype).masked_fill_(~visible, -torch.inf)
        output = self.model(
            input_ids=tokens,
            position_ids=positions.clamp(max=self.max_length - 1),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **self._given,
        )
        logits: Tensor = output.logits
        return logits


class Runner(Passes):
    """The passes of a Hugging Face folder's model, whose weights can be replaced. UserError: it cannot be served."""

    def __init__(self, folder: Path, slots: int, max_length: int, dtype: torch.dtype) -> None:
        model = _load(folder, dtype)
        check_finite(folder)
        super().__init__(model, slots, max_length)
        held = set(Names(model, stored_names(folder)).check(folder).tied.values())  # names a tied weight once
        self._held = {name: tensor for name, tensor in model.state_dict().items() if name in held}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights in place. UserError, and no change, unless all tensors are there, finite and in shape."""
        held = self._held
        wrong = [n for n, p in held.items() if n not in weights or weights[n].shape != p.shape]
        if wrong:
            raise UserError(
                f"the weights do not fit the running model: {len(wrong)} of {len(held)} tensors are missing or of "
                f"another shape, the first is {wrong[0]}. Start a new server for another architecture"
            )
        damaged = [name for name in held if not torch.isfinite(weights[name]).all()]
        if damaged:
            raise UserError(f"the weights hold values that are not finite, first in {damaged[0]}; the old ones stay")
        for name, parameter in held.items():
            parameter.copy_(weights[name])


def read_weights_folder(folder: Path, model: Any) -> dict[str, Tensor]:
    """A Hugging Face folder's tensors by the names of `model`. UserError: unreadable, or not exactly the model's."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors file; name a Hugging Face model folder")
    try:
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        stored = stored_names(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} holds damaged weights ({error}); publish them again") from error
    return Names(model, tensors.keys() & stored).check(folder).to_model(tensors)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model folder: it has no config.json")
    try:
        with BUILDING:
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def _context(config: Any, max_length: int) -> int:
    """Tokens that a sequence may have. Raises UserError for attention that the cache does not support."""
    context = min(max_length, int(getattr(config, "max_position_embeddings", max_length)))
    window = getattr(config, "sliding_window", None)
    default = "sliding_attention" if window else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    sliding = "sliding_attention" in kinds and (window or 0) < context
    if sliding or kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"the embedded server supports full attention only; this {config.model_type} model has layers of kind "
            f"{', '.join(sorted(kinds))}. Use the sglang engine, or a max_length of at most its window ({window})"
        )
    return context


# ── deterministic mode ──────────────────────────────────────────────────────────────────────────────────────────────


LAYERS: Final = 2


def proven_shapes(runner: Runner) -> Shapes:
    """The shapes of `runner` whose rows are bitwise identical to those of the largest. Uses the cache, and clears it.

    The machine determines which matrix kernels run, and from how many rows on they treat each row alike: so this is
    measured. (With AVX-512 nearly all shapes are equal; attention that reads 256 positions is not, since the matrix
    library sums so many in another order.) Two layers suffice, since a model's layers have the same shapes.
    """
    old, positions = runner.shapes, min(16, runner.capacity)
    with _shallow(runner):
        rows = _keep(old.rows, lambda n: _decode(runner, torch.arange(n) % positions, old.lengths[-1]))
        lengths = [n for n in old.lengths[:-1] if _same_length(runner, n)] + old.lengths[-1:]
        prefill = {
            chunk: _keep(sizes, partial(_prefill, runner, chunk=chunk, length=old.lengths[-1], filled=chunk))
            for chunk, sizes in old.prefill_rows.items()
        }
    return Shapes(rows, lengths, prefill)


@contextmanager
def _shallow(runner: Runner) -> Iterator[None]:
    """The model with its first layers only, over a cache full of noise."""
    config, generator = runner.model.config, torch.Generator().manual_seed(0)
    layers, config.num_hidden_layers = config.num_hidden_layers, min(LAYERS, config.num_hidden_layers)
    for layer in runner.cache.layers[:LAYERS]:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    yield
    config.num_hidden_layers = layers
    runner.cache.clear()


def _keep(sizes: list[int], run: Callable[[int], Tensor]) -> list[int]:
    """The sizes whose rows equal the same rows of the largest size."""
    largest = run(sizes[-1])
    return [n for n in sizes[:-1] if torch.equal(run(n), largest[:n])] + sizes[-1:]


def _same_length(runner: Runner, length: int) -> bool:
    """Whether reading `length` positions is bitwise equal to reading all, for sequences of various lengths up to it."""
    full, prefills = runner.shapes.lengths[-1], runner.shapes.prefill_rows
    positions = _spread(runner.rows, length - 1)
    return torch.equal(_decode(runner, positions, length), _decode(runner, positions, full)) and all(
        torch.equal(
            _prefill(runner, sizes[-1], chunk, length, length), _prefill(runner, sizes[-1], chunk, full, length)
        )
        for chunk, sizes in prefills.items()
    )


def _spread(n: int, last: int) -> Tensor:
    """n positions from 0 to `last`, the last one first."""
    return torch.linspace(last, 0, n).round().long() if n > 1 else torch.tensor([last])


def _decode(runner: Runner, positions: Tensor, length: int) -> Tensor:
    """Logits of as many rows as there are positions."""
    return runner.decode(torch.arange(len(positions)) % runner.vocab_size, positions, length)


def _prefill(runner: Runner, n: int, chunk: int, length: int, filled: int) -> Tensor:
    """Logits of n rows whose chunks end at positions up to `filled` (or at the first chunk's end)."""
    tokens = torch.arange(n * chunk).reshape(n, chunk) % runner.vocab_size
    starts = _spread(n, max(min(filled, runner.capacity) - chunk, 0))
    last = chunk - 1 - torch.arange(n) % ROW_MULTIPLE
    return runner.prefill(torch.arange(n), tokens, starts, last, min(max(length, chunk), runner.capacity))
