"""Sums and the character model: what the quickstart stands on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_tasks.data.datasets import sums
from areal_tasks.data.scratch import character_tokenizer, make_scratch
from schemas.errors import UserError
from schemas.recipe.sections import ScratchModel


@pytest.mark.parametrize("terms", [2, 3, 4])
def test_the_splits_are_all_sums_and_share_none(terms: int) -> None:
    train, test = (list(sums(f"sums://{terms}", split)) for split in ("train", "test"))
    prompts = [prompt for prompt, _ in train + test]
    assert len(set(prompts)) == len(prompts) == 10**terms
    assert len(test) == 10 ** (terms - 1)


def test_every_answer_is_the_sum() -> None:
    for prompt, answer in sums("sums://3", "train"):
        assert str(sum(map(int, prompt.removesuffix("=").split("+")))) == answer


def test_rows_are_a_function_of_the_url_alone() -> None:
    assert list(sums("sums://2", "test"))[:3] == SUMS


SUMS = [("7+7=", "14"), ("2+4=", "6"), ("3+0=", "3")]


@pytest.mark.parametrize("url", ["sums://", "sums://1", "sums://9", "sums://four", "sums://4?x=1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="sums://TERMS"):
        list(sums(url, "train"))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="train and test, not 'validation'"):
        list(sums("sums://2", "validation"))


def test_the_scratch_folder_loads_like_any_model(tmp_path: Path) -> None:
    folder = make_scratch(ScratchModel(), 1, 16, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("3+5+9+2=")["input_ids"]
    assert tokenizer.decode(ids) == "3+5+9+2=" and len(ids) == 8
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "3+5+9+2="
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.config.eos_token_id == tokenizer.eos_token_id and model.config.pad_token_id == tokenizer.pad_token_id
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(4e5, rel=0.05)


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first = make_scratch(ScratchModel(), 1, 16, tmp_path / "a")
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(3)
    again, other = (
        make_scratch(ScratchModel(), 1, 16, tmp_path / "b"),
        make_scratch(ScratchModel(), 2, 16, tmp_path / "c"),
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_characters_outside_the_alphabet_are_unknown() -> None:
    tokenizer = character_tokenizer("01", 16)
    assert tokenizer("0x1")["input_ids"].count(tokenizer.unk_token_id) == 1
