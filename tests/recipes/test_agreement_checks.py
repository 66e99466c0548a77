"""Which servers and trainers differ by rounding alone, and which knobs of the decoupled objective act where."""

from __future__ import annotations

import pytest

from schemas.errors import UserError
from schemas.recipe.agreement import needs_proximal, same_code_on_cpu
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

ROUNDS = ["inference.deterministic=false"]  # the quickstart with engines that differ in rounding
ONE = ["algorithm={}", "algorithm.minibatches=1"]
SHARDED = ["trainer.backend=fsdp2"]
ON_GPU = ["trainer.gpus=[0]"]
SGLANG = ["inference={engine: sglang}"]


def recipe(*overrides: str) -> RlhfRecipe:
    loaded = load_recipe("quickstart", list(overrides))
    assert isinstance(loaded, RlhfRecipe)
    return loaded


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ([], True),
        (["trainer.threads=2", "inference.threads=1"], True),
        (ROUNDS, False),
        (SHARDED, False),
        (SGLANG, False),
        (["model.dtype=bfloat16"], False),
        (ON_GPU, False),
    ],
)
def test_the_same_code_on_the_cpu(overrides: list[str], same: bool) -> None:
    assert same_code_on_cpu(recipe(*overrides)) == same


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [([], False), (ONE, False), ([*ROUNDS, *ONE], False), (ROUNDS, True), (SGLANG, True), (ON_GPU, True)],
)
def test_proximal_logprobs_are_needed_where_engines_differ_and_the_policy_moves(
    overrides: list[str], needed: bool
) -> None:
    assert needs_proximal(recipe(*overrides)) == needed


@pytest.mark.parametrize("engines", [[], ROUNDS, SGLANG, SHARDED])
def test_the_clip_acts_from_the_second_minibatch_on_whatever_the_engines(engines: list[str]) -> None:
    assert recipe(*engines, "algorithm.clip_ratio=0.1").algorithm.clip_ratio == 0.1
    with pytest.raises(UserError, match=r"algorithm\.clip_ratio: has no effect with one minibatch"):
        recipe(*engines, *ONE, "algorithm.clip_ratio=0.1")


@pytest.mark.parametrize("minibatches", [[], ONE])
def test_the_behaviour_weight_acts_where_engines_differ(minibatches: list[str]) -> None:
    assert recipe(*ROUNDS, *minibatches, "algorithm.behaviour_cap=1.5").algorithm.behaviour_cap == 1.5
    with pytest.raises(UserError, match=r"algorithm\.behaviour_cap: has no effect with server and trainer on the CPU"):
        recipe(*minibatches, "algorithm.behaviour_cap=1.5")


@pytest.mark.parametrize("engines", [[], ROUNDS])
@pytest.mark.parametrize("minibatches", [[], ONE])
def test_the_threshold_always_acts(engines: list[str], minibatches: list[str]) -> None:
    changed = recipe(*engines, *minibatches, "algorithm.max_logprob_gap=0.5")
    assert changed.algorithm.max_logprob_gap == 0.5
