"""Maps the tensors of a checkpoint to those of the model that transformers builds from it, and back.

transformers 5 (`get_model_conversion_mapping` and its converters, 5.12 to 5.23) renames and merges tensors when it
loads a checkpoint: the experts of a layer, three matrices each, become two tensors. Other programs, such as SGLang,
know only the checkpoint's names. So weights are published under the names that they were loaded from. `Names` plans
transformers' own conversion for one checkpoint as `Group`s, each of which is converted by itself, in both directions.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from schemas.errors import UserError, listed

INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"
#: Tensors of old checkpoints that models compute themselves; transformers ignores them, too.
_COMPUTED: Final = r"rotary_emb\.inv_freq"

#: A stored tensor of a group, the pattern of the group's converter that it matches, and the converter's name for it.
_Member = tuple[str, str | None, str]


def stored_names(folder: Path) -> list[str]:
    """The names of the tensors in the safetensors files of a Hugging Face folder."""
    if (folder / INDEX).is_file():
        return list(json.loads((folder / INDEX).read_bytes())["weight_map"])
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return list(file.keys())


@dataclass(frozen=True)
class _Conversion:
    """One use of a converter of transformers, on tensors that match `patterns` in this order."""

    converter: Any
    layer: str  # transformers' name of the group: that of its first tensor after conversion
    patterns: tuple[str, ...]
    model: Any = field(repr=False)

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        once = deepcopy(self.converter)  # it stores the tensors that it is given
        for pattern, tensor in zip(self.patterns, tensors, strict=True):
            once.add_tensor(self.layer, self.layer, pattern, tensor)
        made = once.convert(self.layer, model=self.model, config=self.model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together: their names in the checkpoint (`stored`) and in the model (`held`)."""

    stored: tuple[str, ...]
    held: tuple[str, ...]
    _forth: _Conversion | None = None  # None: one tensor, identical in both
    _back: _Conversion | None = None
    _made: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # the conversions' names for `held` and `stored`

    @property
    def same(self) -> bool:
        """Whether the group is one tensor that is identical in checkpoint and model."""
        return self._forth is None

    def to_model(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """The tensors named `held`, from those named `stored`, on their device and in their dtype."""
        return list(stored) if self._forth is None else [*map(self._forth(stored).__getitem__, self._made[0])]

    def to_checkpoint(self, held: Sequence[Tensor]) -> list[Tensor]:
        """The tensors named `stored`, from those named `held`; some may be views of these."""
        return list(held) if self._back is None else [*map(self._back(held).__getitem__, self._made[1])]


class Names:
    """The plan for a checkpoint with tensors named `stored` and a `model` on any device (also `meta`), not yet sharded.

    `groups`: of the tensors that checkpoint and model share, in the checkpoint's natural order. `tied`: for each name
    in the model's state, the first name of the same tensor; groups use first names. `buffers`: those first names that
    are not parameters. `missing`: tensors of the model that no stored tensor makes; `unexpected`: stored ones without a
    tensor of the model; neither contains those that the model's class declares as ignored.

    UserError: transformers cannot reverse the conversion of a group.
    """

    def __init__(self, model: Any, stored: Iterable[str]) -> None:
        every: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self.tied = {name: first.setdefault(id(tensor), name) for name, tensor in every.items()}
        parameters = {name for name, _ in model.named_parameters()}
        self.buffers = tuple(name for name in first.values() if name not in parameters)
        self.groups, useless = _Plan(model, every, self.tied).groups(stored)
        made = {name for group in self.groups for name in group.held}
        alone = [name for name in first.values() if name not in made]
        self.missing = _without(alone, model._keys_to_ignore_on_load_missing or ())
        self.unexpected = _without(useless, [_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())])
        self._of: defaultdict[str, list[Group]] = defaultdict(list)
        for group in (*self.groups, *(Group((name,), (name,)) for name in alone)):
            for name in group.held:
                self._of[name].append(group)

    def check(self, source: object) -> Names:
        """Return self. UserError if the checkpoint at `source` lacks tensors of the model or holds others."""
        if self.missing or self.unexpected:
            raise UserError(
                f"{source} does not hold the weights of its architecture; missing: {listed(self.missing)}; unexpected: "
                f"{listed(self.unexpected)}. Missing tensors would be random, and unexpected ones ignored: name a "
                "complete checkpoint as model.path"
            )
        return self

    def to_model(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, from the checkpoint's; without those that are missing or unexpected."""
        made = (
            zip(group.held, group.to_model([stored[n] for n in group.stored]), strict=True) for group in self.groups
        )
        return {name: tensor for pairs in made for name, tensor in pairs}

    def to_checkpoint(self, held: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert the model's tensors, received one at a time, to the checkpoint's names and shapes.

        A group is converted when it is complete: beyond the tensors that wait for others, this takes the memory of one
        group. Tensors that the checkpoint lacks keep their names. UserError, at the end: one is lacking, or left over.
        """
        waiting: dict[str, Tensor] = {}
        left = set(self._of)
        for name, tensor in held:
            waiting[name] = tensor
            left.discard(name)
            ready = [group for group in self._of.get(name, ()) if waiting.keys() >= set(group.held)]
            for group in ready:
                yield from zip(group.stored, group.to_checkpoint([waiting[n] for n in group.held]), strict=True)
            for done in {n for group in ready for n in group.held}:
                del waiting[done]
            del tensor  # frees its memory before the next one is gathered
        if waiting or left:
            raise UserError(
                "the weights to be published are not those of the model, so nothing was published; missing: "
                f"{listed(left)}; left over: {listed(waiting)}"
            )


class _Plan:
    """Sorts stored tensors into groups."""

    def __init__(self, model: Any, every: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        self.model, self.every, self.tied = model, every, tied
        transforms = get_model_conversion_mapping(model)
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.renamings = [t for t in transforms if not isinstance(t, WeightConverter)]

    def groups(self, stored: Iterable[str]) -> tuple[tuple[Group, ...], list[str]]:
        """The groups, and the names of the stored tensors that belong to none."""
        members: defaultdict[str, list[_Member]] = defaultdict(list)  # by transformers' name of the group
        for name in sorted(stored, key=dot_natural_key):  # so that expert 10 comes after expert 9
            layer, pattern = rename_source_key(
                name, self.renamings, self.converters, self.model.base_model_prefix, self.tied
            )
            renamed = rename_source_key(name, self.renamings, [])[0] if pattern else name
            if layer not in self.tied and name in self.tied:  # it was saved under the model's own name
                layer, pattern, renamed = name, None, name
            members[layer].append((name, pattern, renamed))
        known = {layer: found for layer, found in members.items() if layer in self.tied}
        useless = [name for layer, found in members.items() if layer not in known for name, *_ in found]
        return tuple(self._group(layer, found) for layer, found in known.items()), useless

    def _group(self, layer: str, members: Sequence[_Member]) -> Group:
        stored, patterns, renamed = zip(*members, strict=True)
        if not any(patterns):
            return Group(stored[:1], (self.tied[layer],))
        converter = next(c for c in self.converters if not {*patterns}.isdisjoint(c.source_patterns))
        first = converter.target_patterns[0]
        held = tuple(layer.replace(first, target) for target in converter.target_patterns)
        reverse = converter.reverse_transform()
        layers, of_held = zip(*(reverse.rename_source_key(name) for name in held), strict=True)
        forth = _Conversion(converter, layer, patterns, self.model)
        back = _Conversion(reverse, layers[0], of_held, self.model)
        if back([torch.empty_like(self.every[name], device="meta") for name in held]).keys() != set(renamed):
            raise UserError(
                f"transformers converts {listed(stored)} of the checkpoint to {listed(held)}, and cannot "
                "do the reverse, so new weights could not be published under the checkpoint's names. Is the checkpoint "
                "complete? model.path must be a complete one, with the usual names of its model family"
            )
        return Group(stored, tuple(self.tied[name] for name in held), forth, back, (held, renamed))


def _without(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(re.search(pattern, name) for pattern in patterns))
