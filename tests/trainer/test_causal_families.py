"""Models of every family are right, each sample as transformers computes it alone, or refused by name at load."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from areal_tasks.data.batching import LayoutKind, make_layout, make_sequences
from areal_tasks.engines.trainer.local import LocalBackend
from schemas.errors import UserError
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer
from tests.trainer.causal_families import CAUSAL, fits, tiny_config
from tests.trainer.families import save_random

LAYOUTS: list[LayoutKind] = ["packed", "padded"]
GUIDE = Path(__file__).parents[2] / "docs/guides/model.md"
#: Beyond the windows and chunks of all families.
TEXTS = [torch.randint(4, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (70, 9, 33)]


def gap(family: str, layout: LayoutKind, folder: Path) -> float:
    """How far a trainer that has loaded a model of the family is from transformers, in nats, beyond ten times the
    rounding of transformers itself. UserError: it was refused.
    """
    if not folder.exists():
        save_random(tiny_config(family), folder, buffers=False)
    backend = LocalBackend(Trainer(layout=layout), Model(path=str(folder), dtype="float32", max_length=128))
    backend.load(folder, 0)
    ids, lengths = torch.cat(TEXTS), torch.tensor([len(text) for text in TEXTS])
    sequences = make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), lengths)
    found = backend.score(make_layout(sequences, torch.arange(len(TEXTS)), layout), 1.0, "policy").logprobs
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = exact = torch.cat([alone(model, text) for text in TEXTS])
    with suppress(RuntimeError):  # products of experts have no float64
        exact = torch.cat([alone(deepcopy(model).double(), text) for text in TEXTS])
    return float((found - expected).abs().max() - 10 * (exact - expected).abs().max())


@torch.no_grad()
def alone(model: Any, text: Tensor) -> Tensor:
    logits = model(input_ids=text[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, text[1:, None])[:, 0]


#: By the trainer's attention or transformers'; padded only, for a convolution, a state or a mask; not causal.
KINDS = {
    "llama": "both", "nemotron": "both", "llama4_text": "both", "lfm2": "padded", "olmo_hybrid": "padded",
    "bloom": "padded", "bert": "neither",
}  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
def test_a_loaded_model_is_right_in_a_layout_or_refused(family: str, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        if KINDS[family] in ("both", layout):
            assert gap(family, layout, tmp_path / family) < 1e-4
            continue
        remedy = "set trainer.layout to padded" if KINDS[family] == "padded" else "use another model"
        with pytest.raises(UserError, match=rf"cannot train {family} models in {layout} passes: .*{remedy}"):
            gap(family, layout, tmp_path / family)


def test_kernels_that_keep_packed_samples_apart_are_told_where_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the package causal-conv1d does on a GPU, with `seq_idx`."""

    def convolve(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None, **_: Any
    ) -> Tensor:
        lengths = [hidden.shape[-1]] if seq_idx is None else torch.bincount(seq_idx[0]).tolist()
        parts = [F.pad(part, (weight.shape[-1] - 1, 0)) for part in hidden.split(lengths, -1)]
        return torch.cat([F.conv1d(part, weight[:, None], bias, groups=len(weight)) for part in parts], -1)

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", convolve)
    monkeypatch.setattr("areal_tasks.engines.trainer.proven._PROVEN", {})
    assert gap("lfm2", "packed", tmp_path / "lfm2") < 1e-4


@pytest.mark.slow("about 170 families of models, each built several times")
def test_every_family_that_transformers_has_is_right_or_refused(tmp_path: Path) -> None:
    """The guide has the same lists, for the version of transformers that it names."""
    found = defaultdict[str, set[str]](set)
    for family in filter(fits, CAUSAL):
        right = [layout for layout in LAYOUTS if _is_right(family, layout, tmp_path / family)]
        shutil.rmtree(tmp_path / family)
        found["both" if len(right) == 2 else right[0] if right else "neither"].add(family)
    print({name: " ".join(sorted(families)) for name, families in found.items()})
    assert sum(map(len, found.values())) > 150 and len(found["both"]) > 90 and "packed" not in found
    text = GUIDE.read_text()
    if f"transformers {transformers.__version__}" in text:
        lists = re.findall(r"^- \*\*(both|padded|neither)\*\*.*?: ((?:.|\n  )*)", text, re.MULTILINE)
        assert {name: set(re.findall(r"[\w-]+", families)) for name, families in lists} == dict(found)


def _is_right(family: str, layout: LayoutKind, folder: Path) -> bool:
    try:
        apart = gap(family, layout, folder)
    except UserError as refusal:
        print(family, layout, refusal)
        return False
    assert apart < 1e-4, (family, layout)
    return True
