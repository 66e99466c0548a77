"""A model whose weights are read share by share is the one that transformers loads whole, in every bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal_tasks.engines.empty import empty_model, replace_parameters
from areal_tasks.engines.names import Names
from areal_tasks.engines.shallow import read_config
from areal_tasks.engines.trainer import shares
from areal_tasks.engines.trainer.attention import NAME
from areal_tasks.engines.trainer.loading import empty_policy, read_policy
from areal_tasks.engines.trainer.policy import Policy
from areal_tasks.engines.trainer.shares import Share, fill, first_row
from schemas.errors import UserError
from schemas.recipe.training import Trainer
from tests.trainer.families import DENSE, MIXED, assert_same, make_family

CPU = torch.device("cpu")
FAMILIES = [*DENSE, *MIXED]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model."""
    root = tmp_path_factory.mktemp("families")

    def make(family: str) -> Path:
        return root / family if (root / family).exists() else make_family(family, root / family)

    return make


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
    return read_policy(folder, Trainer(layout="padded"), CPU, dtype)  # packed passes of gpt_oss are refused


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_buffers_are_those_that_transformers_loads(
    family: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "READ_ELEMENTS", 100)  # tensors of these models are read in pieces, too
    found, expected = read(made(family)), AutoModelForCausalLM.from_pretrained(made(family), dtype=torch.float32)
    assert_same(dict(found.model.named_parameters()), dict(expected.named_parameters()))
    assert_same(dict(found.model.named_buffers()), dict(expected.named_buffers()))
    assert not found.model.training
    rounded = {name: parameter.bfloat16() for name, parameter in expected.named_parameters()}
    assert_same(dict(read(made(family), torch.bfloat16).model.named_parameters()), rounded)


def test_a_model_is_built_without_memory_for_its_parameters(made: Callable[[str], Path]) -> None:
    before = torch.get_rng_state()
    model = empty_model(read_config(made("deepseek_v3")), NAME)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(torch.get_rng_state(), before)


def test_others_build_real_modules_meanwhile_and_afterwards(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere: list[nn.Module] = []

    def build(*_: Any, **__: Any) -> Any:
        thread = threading.Thread(target=lambda: elsewhere.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build)
    assert empty_model(read_config(made("llama")), NAME).weight.is_meta
    assert not elsewhere[0].weight.is_meta and not nn.Linear(2, 2).weight.is_meta


def test_tied_parameters_stay_tied(made: Callable[[str], Path]) -> None:
    model = read(made("qwen2")).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ours = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    ours[1].weight = ours[0].weight
    replace_parameters(ours, lambda parameter: nn.Parameter(parameter + 1))
    assert ours[1].weight is ours[0].weight


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_shared_as_torch_shares_them(rows: int, parts: int) -> None:
    chunks = torch.arange(rows).chunk(parts)
    for part in range(parts):
        expected = int(chunks[part][0]) if part < len(chunks) and len(chunks[part]) else rows
        assert first_row(rows, parts, part) == expected


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3)


@given(st.data(), SHAPES, st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_any_run_of_elements_is_read_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], piece: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    whole = torch.randn(shape)
    save_file({"x": whole}, folder / "model.safetensors")
    start = data.draw(st.integers(0, whole.numel()))
    count = data.draw(st.integers(0, whole.numel() - start))
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(shape))})
    target = torch.full((count,), torch.nan, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "READ_ELEMENTS", piece)
        fill(folder, _plain(model), {"x": Share(target, whole.shape, start)})
    assert torch.equal(target, whole.flatten()[start : start + count].double())


def _plain(model: nn.Module) -> Names:
    """The names of a model that is stored as it is."""
    for name in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):
        setattr(model, name, None)
    model.base_model_prefix, model.config = "", None  # type: ignore[assignment]
    return Names(model, model.state_dict())


def changed(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """A copy of a model's folder with other tensors and another configuration."""
    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    given = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(given | config))
    return into


def test_a_checkpoint_that_lacks_a_parameter_is_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers makes up what is missing."""
    folder = changed(made("llama"), tmp_path / "less", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"lack tensors of their model: model\.norm\.weight"):
        read(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tensors_of_another_shape_are_refused(family: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    with pytest.raises(UserError, match=r"not of the model that their config\.json describes"):
        read(changed(made(family), tmp_path / "other", lambda _: None, **sizes))


def test_a_tied_tensor_may_be_stored_twice_if_it_is_the_same(made: Callable[[str], Path], tmp_path: Path) -> None:
    same = changed(made("qwen2"), tmp_path / "same", lambda t: t.update({"lm_head.weight": embeddings(t).clone()}))
    assert_same(dict(read(same).named_parameters()), dict(read(made("qwen2")).named_parameters()))
    other = changed(made("qwen2"), tmp_path / "other", lambda t: t.update({"lm_head.weight": embeddings(t) + 1}))
    with pytest.raises(UserError, match=r"ties lm_head\.weight, model\.embed_tokens\.weight, but"):
        read(other)


def embeddings(tensors: dict[str, Tensor]) -> Tensor:
    return tensors["model.embed_tokens.weight"]


def test_quantised_weights_are_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match="are quantised and cannot be trained"):
        empty_policy(changed(made("llama"), tmp_path / "fp8", lambda _: None, **quantised), Trainer())
