"""What is published has names, shapes and values of the checkpoint it came from, whatever transformers makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainer_builders import World, advantage, rlhf_recipe, rollout
from transformers import AutoModelForCausalLM

from areal_tasks.engines.trainer.commands import Compare, Load, Publish
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import upload
from schemas.errors import UserError
from tests.trainer.families import DENSE, MIXED, Tensors, assert_same, make_family, stored

LENGTHS = [9, 4, 13, 6]


def world_of(folder: Path, family: str, dtype: str = "float32", **changes: Any) -> World:
    """A store whose version 0 is a tiny model of that family, in float32."""
    recipe = rlhf_recipe(algorithm={"minibatches": 1})
    recipe["model"] = {**recipe["model"], "dtype": dtype}
    return World(open_store(f"file://{folder}/store"), make_family(family, folder / "model", **changes), recipe)


def published(world: World, trainer: Trainer, attempt: str = "a") -> Path:
    version = trainer.fence.version or 0
    prefix = world.folder("weights", version, attempt)
    files = trainer.publish(Publish(owner=1, version=version, prefix=prefix)).files
    world.commit("weights", version, attempt, files)
    folder = world.store.local(prefix)
    assert folder is not None
    return folder


def state_of(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """What transformers makes of a folder; it must take every tensor of it and lack none."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


def moved(trainer: Trainer) -> None:
    """Every weight of the policy becomes another."""
    with torch.no_grad():
        for parameter in trainer.backend.models["policy"].parameters():  # type: ignore[attr-defined]
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_version_0_is_published_as_it_was_found(family: str, tmp_path: Path) -> None:
    world = world_of(tmp_path, family)
    assert_same(stored(published(world, world.trainer())), stored(world.model))


@pytest.mark.parametrize("family", [*DENSE, *MIXED])
def test_new_weights_are_read_back_as_they_are_held(family: str, tmp_path: Path) -> None:
    world = world_of(tmp_path, family)
    trainer = world.trainer()
    moved(trainer)
    folder = published(world, trainer)
    assert {n: t.shape for n, t in stored(folder).items()} == {n: t.shape for n, t in stored(world.model).items()}
    assert_same(state_of(folder), dict(trainer.backend.models["policy"].model.state_dict()))  # type: ignore[attr-defined]
    assert all(not torch.equal(t, stored(world.model)[n]) for n, t in stored(folder).items() if "bias" not in n)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_bfloat16_weights_are_rounded_and_what_is_no_weight_is_not(family: str, tmp_path: Path) -> None:
    """DeepSeek-V3's correction of the router's scores is kept in float32 by checkpoints and servers."""
    world = world_of(tmp_path, family, "bfloat16")
    files = stored(published(world, world.trainer()))
    exact = {name for name, tensor in files.items() if tensor.dtype == torch.float32}
    assert exact == {name for name in files if name.endswith("e_score_correction_bias")}
    initial = stored(world.model)
    assert_same(files, {n: t if n in exact else t.bfloat16() for n, t in initial.items()})


def test_experts_learn_and_are_published(tmp_path: Path) -> None:
    world = world_of(tmp_path, "qwen3_moe")
    trainer = world.trainer()
    table = rollout(LENGTHS)
    trainer.train(world.train_command(0, {"rollout": table, "advantage": advantage(table)}))
    files, initial = stored(published(world, trainer)), stored(world.model)
    assert files.keys() == initial.keys()
    experts = [name for name in files if ".experts." in name]
    assert len(experts) == 2 * 12 * 3
    changed = [name for name in experts if not torch.equal(files[name], initial[name])]
    assert len(changed) > len(experts) / 2, "most were chosen for some token"


def test_published_experts_are_loaded_and_compared_as_they_were_left(tmp_path: Path) -> None:
    world = world_of(tmp_path, "qwen3_moe")
    first = world.trainer()
    moved(first)
    ref = world.commit(
        "weights", 0, "b", first.publish(Publish(owner=1, version=0, prefix=world.folder("weights", 0, "b"))).files
    )
    again = Trainer(world.spec())
    again.load(Load(owner=1, version=0, weights=ref))
    assert again.compare(Compare(owner=1, version=0, weights=ref)).difference == 0.0
    assert first.compare(Compare(owner=1, version=0, weights=ref)).difference == 0.0
    assert again.compare(Compare(owner=1, version=0, weights=world.initial)).difference > 0.0


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2"])
def test_weights_of_runs_that_began_under_the_models_own_names_are_compared_by_value(
    family: str, tmp_path: Path
) -> None:
    """Experts were published merged, and a tied matrix under one name though its checkpoint may have two."""
    model = make_family(family, tmp_path / "model")
    if family == "qwen2":
        tensors = stored(model)
        both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(both, model / "model.safetensors", metadata={"format": "pt"})
    world = World(open_store(f"file://{tmp_path}/store"), model, rlhf_recipe())
    trainer = world.trainer()
    names = stored(published(world, trainer)).keys()
    own = dict(trainer.backend.named_weights())
    assert names != own.keys()
    old = shutil.copytree(world.model, tmp_path / "old")
    save_file(own, old / "model.safetensors", metadata={"format": "pt"})
    ref = world.commit("weights", 0, "o", upload(world.store, world.folder("weights", 0, "o"), old))
    assert trainer.compare(Compare(owner=1, version=0, weights=ref)).difference == 0.0
    name = "model.layers.1.mlp.gate.weight" if family == "qwen3_moe" else "model.embed_tokens.weight"
    with torch.no_grad():
        trainer.backend.models["policy"].model.get_parameter(name)[0, 0] += 0.25  # type: ignore[attr-defined]
    trainer.snapshot.version = None
    assert trainer.compare(Compare(owner=1, version=0, weights=ref)).difference == pytest.approx(0.25)


def test_many_files_name_each_expert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_tasks.engines.trainer.snapshot.SHARD_BYTES", 20_000)
    world = world_of(tmp_path, "qwen3_moe")
    folder = published(world, world.trainer())
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == stored(world.model).keys() and len(set(places.values())) > 2
    assert_same(state_of(folder), state_of(world.model))


def test_a_policy_that_has_lost_a_tensor_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(tmp_path, "qwen3_moe")
    trainer = world.trainer()
    whole = trainer.backend.named_weights

    def without_a_router() -> Any:
        return (pair for pair in whole() if pair[0] != "model.layers.1.mlp.gate.weight")

    monkeypatch.setattr(trainer.backend, "named_weights", without_a_router)
    with pytest.raises(UserError, match=r"nothing was published; missing: model\.layers\.1\.mlp\.gate\.weight"):
        published(world, trainer)
    monkeypatch.undo()
    assert_same(stored(published(world, trainer, "b")), stored(world.model))
