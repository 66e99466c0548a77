"""What is known to fail is refused before a run exists."""

from __future__ import annotations

import sys

import pytest

from areal_tasks.stages.preflight import check_engines
from schemas.errors import UserError
from schemas.recipe.load import load_recipe


@pytest.mark.parametrize("name", ["gsm8k", "evaluate-gsm8k"])
def test_an_engine_that_is_not_installed_is_named_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # not even where it is installed
    with pytest.raises(UserError, match=r"inference\.engine: sglang is not installed here; run: pip install 'arealfl"):
        check_engines(load_recipe(name))


def test_servers_that_run_elsewhere_need_no_engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "10.0.0.5:30000")
    check_engines(load_recipe("evaluate-gsm8k"))


def test_deepspeed_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    recipe = load_recipe("sft-gsm8k", ["trainer.backend=deepspeed"])
    with pytest.raises(UserError, match=r"trainer\.backend: deepspeed is not installed here"):
        check_engines(recipe)


def test_fsdp2_needs_nothing_more() -> None:
    check_engines(load_recipe("sft-gsm8k"))


def test_the_engines_of_the_quickstart_are_there() -> None:
    check_engines(load_recipe("quickstart"))
    check_engines(load_recipe("quickstart-sft"))
