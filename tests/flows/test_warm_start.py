"""A run that cannot be opened is refused before its warm start, not after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from flows.rlhf import warm_started
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe


def quickstart(store: str, *overrides: str) -> RlhfRecipe:
    recipe = load_recipe("quickstart", [f"store.url={store}", *overrides])
    assert isinstance(recipe, RlhfRecipe)
    return recipe


def test_another_recipe_under_the_name_is_refused_before_the_sft_run(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    there = quickstart(url, "model.warm_start=", "model.path=run://mine-sft", "trainer.lr=0.01")
    open_run(open_store(url), "mine", there)
    with pytest.raises(UserError, match=r"'mine' exists with another recipe: .*trainer\.lr"):
        warm_started(quickstart(url), "mine")
    assert not open_store(url).exists("mine-sft/run.json")


def test_a_name_that_cannot_be_one_is_refused_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'Mine' cannot name a run"):
        warm_started(quickstart(tmp_path.as_uri()), "Mine")
