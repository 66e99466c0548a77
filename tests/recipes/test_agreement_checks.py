"""Which servers and trainers differ by rounding alone, and which knobs of the decoupled objective act where."""

from __future__ import annotations

import pytest

from areal_tasks.stages.graphs import iteration_plan
from areal_tasks.store.keys import recipe_values
from schemas.errors import UserError
from schemas.recipe.derived import is_decoupled, needs_proximal, same_code_on_cpu
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

ROUNDS = ["inference.deterministic=false"]  # the quickstart with engines that differ in rounding
ONE = ["algorithm={}", "algorithm.minibatches=1"]
SHARDED = ["trainer.backend=fsdp2"]
ON_GPU = ["trainer.gpus=[0]"]
SGLANG = ["inference={engine: sglang}"]
STALE = ["rollout.max_head_offpolicyness=2"]
PLAIN = ["algorithm.decoupled=false"]
SEQUENCE = ["algorithm.tis_level=sequence"]


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
    [
        *(([], False), (ONE, False), ([*ROUNDS, *ONE], False), (ROUNDS, True), (SGLANG, True), (ON_GPU, True)),
        *((STALE, True), ([*STALE, *ONE], False), ([*STALE, *PLAIN], False), ([*ROUNDS, *PLAIN], False)),
        *(([*STALE, *ONE, *SEQUENCE], True), ([*ROUNDS, *ONE, *SEQUENCE], True)),
    ],
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


@pytest.mark.parametrize("engines", [[], ROUNDS, SGLANG])
def test_the_objective_is_decoupled_where_samples_are_old_whatever_the_engines(engines: list[str]) -> None:
    assert is_decoupled(recipe(*engines, *STALE)) and not is_decoupled(recipe(*engines, *STALE, *PLAIN))
    assert is_decoupled(recipe(*engines)) == bool(engines)


def test_plain_ppo_clips_with_one_minibatch_too() -> None:
    """The ratio is to the policy that has sampled."""
    chosen = recipe(*STALE, *ONE, *PLAIN, "algorithm.clip_ratio=0.1")
    assert chosen.algorithm.clip_ratio == 0.1
    with pytest.raises(UserError, match=r"algorithm\.clip_ratio: has no effect with one minibatch"):
        recipe(*STALE, *ONE, "algorithm.clip_ratio=0.1")


@pytest.mark.parametrize("overrides", [[], ROUNDS, ["algorithm.kl=reward", "algorithm.kl_coef=0.1"]])
def test_keys_of_synchronous_runs_know_nothing_of_it(overrides: list[str]) -> None:
    values = stage_values(*overrides)
    added = ("decoupled", "tis_bound", "tis_low", "tis_high", "tis_level", "offpolicyness")
    assert not [path for found in values.values() for path in found if path.endswith(added)]
    assert stage_values(*STALE)["train"]["rollout.max_head_offpolicyness"] == 2
    assert not stage_values(*STALE, *PLAIN)["train"]["algorithm.decoupled"]


def stage_values(*overrides: str) -> dict[str, dict[str, object]]:
    """What enters the keys of an iteration's stages, by stage."""
    chosen = recipe(*overrides)
    return {stage.name: recipe_values(chosen, stage.fields) for stage in iteration_plan(chosen, 0).stages}


def test_kl_in_the_reward_of_old_samples_is_by_the_trainer() -> None:
    reward = ["algorithm.kl=reward", "algorithm.kl_coef=0.1", *ONE]
    for overrides, asked in (([], False), (STALE, True), ([*STALE, *PLAIN], True)):
        assert ("proximal" in stage_values(*reward[2:], *reward[:2], *overrides)) == asked


@pytest.mark.parametrize("minibatches", [[], ONE])
def test_the_behaviour_weight_acts_where_engines_differ(minibatches: list[str]) -> None:
    assert recipe(*ROUNDS, *minibatches, "algorithm.tis_cap=1.5").algorithm.tis_cap == 1.5
    with pytest.raises(UserError, match=r"algorithm\.tis_cap: has no effect with server and trainer on the CPU"):
        recipe(*minibatches, "algorithm.tis_cap=1.5")


@pytest.mark.parametrize("engines", [[], ROUNDS])
@pytest.mark.parametrize("minibatches", [[], ONE])
def test_the_threshold_always_acts(engines: list[str], minibatches: list[str]) -> None:
    changed = recipe(*engines, *minibatches, "algorithm.max_logprob_gap=0.5")
    assert changed.algorithm.max_logprob_gap == 0.5
