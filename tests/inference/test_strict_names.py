"""The embedded engine takes exactly its model's tensors, by the checkpoint's names, and says which it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_tasks.engines.embedded.runner import Runner, read_weights_folder
from schemas.errors import UserError
from tests.trainer.families import make_family

GONE, EXTRA = "model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


def altered(folder: Path, into: Path, *gone: str, **extra: torch.Tensor) -> Path:
    """A copy of a model's folder without some tensors, and with others."""
    shutil.copytree(folder, into)
    tensors = load_file(into / "model.safetensors")
    for name in gone:
        del tensors[name]
    save_file({**tensors, **extra}, into / "model.safetensors", metadata={"format": "pt"})
    return into


NAMES = [
    ({"gone": ("model.norm.weight",)}, "missing: model.norm.weight; unexpected: none"),
    ({"extra": {"v_head.weight": torch.zeros(1)}}, "missing: none; unexpected: v_head.weight"),
]


@pytest.mark.parametrize(("change", "message"), NAMES)
def test_tensors_that_are_missing_or_too_many_are_named(
    change: dict[str, object], message: str, experts: Path, tmp_path: Path
) -> None:
    """At the start, where transformers would make up what is missing, and when it gets new weights."""
    folder = altered(experts, tmp_path / "bad", *change.get("gone", ()), **change.get("extra", {}))  # type: ignore[call-overload, arg-type]
    with pytest.raises(UserError, match=message):
        Runner(folder, 8, 64, torch.float32)
    with pytest.raises(UserError, match=message):
        read_weights_folder(folder, AutoModelForCausalLM.from_pretrained(experts))


def test_experts_under_transformers_own_names_are_no_others(experts: Path, tmp_path: Path) -> None:
    """Beside the checkpoint's they would be skipped; alone they are those of runs of earlier versions."""
    model = AutoModelForCausalLM.from_pretrained(experts)
    own = dict(model.named_parameters())
    with pytest.raises(UserError, match=r"experts\.gate_up_proj, and cannot do the reverse"):
        read_weights_folder(altered(experts, tmp_path / "half", **{EXTRA: own[EXTRA].detach().clone()}), model)
    old = tmp_path / "old"
    shutil.copytree(experts, old)
    save_file({n: t.detach().clone() for n, t in own.items()}, old / "model.safetensors", metadata={"format": "pt"})
    read = read_weights_folder(old, model)
    assert read.keys() == own.keys() and all(torch.equal(read[name], own[name]) for name in own)


def test_one_expert_too_few_is_refused(experts: Path, tmp_path: Path) -> None:
    folder = altered(experts, tmp_path / "bad", GONE)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.\d+\.\w+\.weight, .*Is the checkpoint complete\?"):
        read_weights_folder(folder, AutoModelForCausalLM.from_pretrained(experts))
