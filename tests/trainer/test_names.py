"""The tensors of a checkpoint and of the model, each made of the others; transformers itself is the reference."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_tasks.engines.names import Names, stored_names
from schemas.errors import UserError
from tests.trainer.families import DENSE, MIXED, RENAMED, Tensors, assert_same, make_family, stored

FAMILIES = [*DENSE, *MIXED]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def held(model: Any, names: Names) -> Tensors:
    """What the model holds, each tensor once."""
    return dict(model.named_parameters()) | {name: model.get_buffer(name) for name in names.buffers}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_made_of_its_checkpoint_as_transformers_makes_it(family: str, tmp_path: Path) -> None:
    files, model = stored(make_family(family, tmp_path)), loaded(tmp_path)
    names = Names(model, stored_names(tmp_path))
    assert_same(names.to_model(files), held(model, names))
    assert (names.missing, names.unexpected) == ((), ())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoint_is_made_of_the_model_again(family: str, tmp_path: Path) -> None:
    files, model = stored(make_family(family, tmp_path)), loaded(tmp_path)
    names = Names(model, files)
    before = held(model, names)
    made = dict(names.to_checkpoint(before.items()))
    assert_same(made, files)
    assert (before.keys() != files.keys()) or family not in RENAMED
    if family in DENSE:
        assert list(made) == list(before), "in the model's order"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_plan_needs_no_weights(family: str, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    ours, theirs = Names(empty, stored_names(tmp_path)), Names(loaded(tmp_path), stored_names(tmp_path))
    assert [(g.stored, g.held) for g in ours.groups] == [(g.stored, g.held) for g in theirs.groups]
    assert (ours.buffers, ours.tied) == (theirs.buffers, theirs.tied)


def test_tensors_that_make_one_may_come_in_any_order_and_do_not_wait_for_others(tmp_path: Path) -> None:
    """Nomic's attention is the other way round: three tensors of the model are one of the checkpoint."""
    names, shapes = nomic(tmp_path)
    tensors = [(name, torch.full(tensor.shape, float(i))) for i, (name, tensor) in enumerate(shapes.items())]
    random.Random(1).shuffle(tensors)
    taken: list[str] = []

    def coming() -> Any:
        for name, tensor in tensors:
            taken.append(name)
            yield name, tensor

    values = dict(tensors)
    for name, tensor in names.to_checkpoint(coming()):
        group = next(g for g in names.groups if name in g.stored)
        assert set(group.held) <= set(taken) and taken[-1] in group.held, "as soon as it is whole"
        if len(group.held) == 3:
            assert torch.equal(tensor, torch.cat([values[n] for n in group.held]))
    assert {len(group.held) for group in names.groups} == {1, 3}


def test_no_more_than_one_group_is_in_memory(tmp_path: Path) -> None:
    model = loaded(make_family("qwen3_moe", tmp_path))
    names = Names(model, stored_names(tmp_path))
    alive: set[str] = set()
    most = 0

    def coming() -> Any:
        for name, tensor in held(model, names).items():
            whole = tensor.detach().clone()  # as one that was gathered from its shares
            alive.add(name)
            weakref.finalize(whole, alive.discard, name)
            yield name, whole
            del whole

    for _, tensor in names.to_checkpoint(coming()):
        most = max(most, len(alive))
        assert tensor is not None
    assert most == 1


def nomic(folder: Path) -> tuple[Names, Tensors]:
    """The plan and the tensors of a model whose checkpoint has fewer tensors than itself."""
    if not hasattr(transformers, "NomicBertModel"):
        pytest.skip("this transformers has no such model yet")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(vocab_size=32, **sizes))
    model.save_pretrained(folder)
    names = Names(model, stored_names(folder))
    return names, held(model, names)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model = loaded(make_family("qwen3_moe", tmp_path))
    names = Names(model, stored_names(tmp_path))
    tensors = held(model, names)
    gone = "model.layers.1.mlp.experts.gate_up_proj"
    del tensors[gone]
    with pytest.raises(UserError, match=rf"nothing was published; missing: {gone}; left over: none"):
        list(names.to_checkpoint(tensors.items()))
    with pytest.raises(UserError, match="missing: none; left over: extra"):
        list(names.to_checkpoint([*tensors.items(), (gone, torch.zeros(12, 32, 32)), ("extra", torch.zeros(1))]))


def test_what_a_checkpoint_lacks_or_has_besides_is_named(tmp_path: Path) -> None:
    make_family("llama", tmp_path)
    files = stored(tmp_path)
    lacking = [name for name in files if name != "model.norm.weight"]
    names = Names(loaded(tmp_path), [*lacking, "v_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
    assert (names.missing, names.unexpected) == (("model.norm.weight",), ("v_head.weight",))


def test_what_a_family_ignores_is_not_unexpected(tmp_path: Path) -> None:
    """DeepSeek-V3 has a 62nd layer that predicts a second token: transformers does not load it."""
    model = loaded(make_family("deepseek_v3", tmp_path))
    assert Names(model, [*stored(tmp_path), "model.layers.61.embed_tokens.weight"]).unexpected == ()


@pytest.mark.parametrize("kept", [("model.embed_tokens.weight",), ("lm_head.weight",), ()])
def test_a_tied_tensor_has_the_names_that_the_checkpoint_gives_it(kept: tuple[str, ...], tmp_path: Path) -> None:
    files = stored(make_family("qwen2", tmp_path))
    embedding = files.pop("model.embed_tokens.weight")
    both = ("model.embed_tokens.weight", "lm_head.weight")
    files |= {name: embedding.clone() for name in kept or both}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = loaded(tmp_path)
    names = Names(model, stored_names(tmp_path))
    tensors = held(model, names)
    assert sum(torch.equal(tensor, embedding) for tensor in tensors.values()) == 1
    assert_same(dict(names.to_checkpoint(tensors.items())), files)


def test_a_checkpoint_with_transformers_own_names_keeps_them(tmp_path: Path) -> None:
    """As earlier versions of this program published the experts: their runs go on."""
    model = loaded(make_family("qwen3_moe", tmp_path))
    tensors = held(model, Names(model, stored_names(tmp_path)))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = loaded(tmp_path)
    names = Names(again, stored_names(tmp_path))
    assert_same(dict(names.to_checkpoint(held(again, names).items())), tensors)


def test_an_incomplete_group_is_refused(tmp_path: Path) -> None:
    model = loaded(make_family("qwen3_moe", tmp_path))
    files = [name for name in stored(tmp_path) if ".experts.11." not in name]
    with pytest.raises(UserError, match=r"experts\.0\.\w+\.weight, .* \(\d+ in all\).*Is the checkpoint complete\?"):
        Names(model, files)


def test_names_of_several_files_are_those_of_their_index(tmp_path: Path) -> None:
    make_family("llama", tmp_path / "one")
    loaded(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert sorted(stored_names(tmp_path / "many")) == sorted(stored_names(tmp_path / "one"))
