"""Every field of a recipe at its bounds: refused by a message that names a field, or all that needs no engine runs.

The cases are made from the schema, so that a new field has its cases too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from areal_tasks.algorithms.advantages import grpo_advantages, kl_penalty
from areal_tasks.data.batching import make_sequences, micro_batches, minibatches
from areal_tasks.data.datasets import load_rows
from areal_tasks.data.scratch import character_tokenizer
from areal_tasks.data.tokenising import render_prompts
from areal_tasks.engines.embedded.sequence import sample
from areal_tasks.engines.trainer.forward import one_thread
from areal_tasks.engines.trainer.objective import grpo_objective
from areal_tasks.engines.trainer.optimizer import clip_gradients, learning_rate, make_optimizer, step_at
from areal_tasks.engines.trainer.settings import read_settings
from areal_tasks.launchers.gpus import place_recipe
from areal_tasks.stages.graphs import evaluates_at_end, iteration_plan, iterations
from areal_tasks.stages.prompts import new_tokens, splits
from areal_tasks.store.keys import recipe_values
from flows.alerts import AlertMonitor
from schemas.errors import UserError
from schemas.recipe.fields import Section, nested_section
from schemas.recipe.load import RECIPES, apply_overrides, list_recipes, load_recipe, parse_recipe
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe

GPUS = tuple(map(str, range(8)))
#: Recipes whose settings are much like those of another one.
LIKE = ("gsm8k-cpu", "gsm8k", "quickstart", "smollm2-gsm8k")
OTHERS = pytest.mark.slow("the asynchronous recipe of that name has the same fields and more in use")
#: What a bound may need with it to have an effect, by field: the first that is accepted.
COMPANIONS: dict[str, tuple[str, ...]] = {
    "model.max_length": (
        "trainer.micro_batch_tokens=2000000",
        "rollout.max_new_tokens=2; evaluation.max_new_tokens=2",
    ),
    "model.scratch.hidden": ("model.scratch.heads=1",),
    "model.scratch.heads": ("model.scratch.hidden=4096",),
    "rollout.max_new_tokens": ("model.max_length=200000; trainer.micro_batch_tokens=200000",),
    "rollout.groups": ("algorithm.minibatches=1",),
    "rollout.bound": ("rollout.max_head_offpolicyness=1",),
    "rollout.interruption": ("rollout.max_head_offpolicyness=1",),
    "rollout.group_size": ("algorithm.reward_norm=none",),
    "rollout.pace": ("rollout.max_head_offpolicyness=1",),
    "workflow.blocked_seconds": ("workflow.name=working:Own",),
    "workflow.verifies": ("workflow.name=working:Own",),
    "reward.unverified_reward": ("reward.on_unverified=reward",),
    "algorithm.kl": ("algorithm.kl_coef=0.1",),
    "algorithm.kl_coef": ("algorithm.kl=loss", "algorithm.kl=none"),
    "algorithm.tis_cap": ("inference.deterministic=false",),
    "algorithm.decoupled": ("rollout.max_head_offpolicyness=1",),
    "algorithm.tis_bound": ("rollout.max_head_offpolicyness=1",),
    "algorithm.tis_low": ("rollout.max_head_offpolicyness=1; algorithm.tis_bound=mask",),
    "algorithm.tis_high": ("rollout.max_head_offpolicyness=1; algorithm.tis_bound=mask",),
    "algorithm.tis_level": ("rollout.max_head_offpolicyness=1",),
    "alerts.min_effective_sample_size": ("rollout.max_head_offpolicyness=1",),
    "alerts.max_lag_beyond": ("rollout.max_head_offpolicyness=1; rollout.bound=admission",),
    "alerts.max_behaviour_clipped": ("rollout.max_head_offpolicyness=1",),
    "algorithm.minibatches": ("rollout.groups=1024; algorithm.clip_ratio=0.2",),
    "algorithm.clip_ratio": ("algorithm.minibatches=4",),
    "trainer.lr_schedule": ("trainer.lr_final=0.1", "trainer.lr_final=1"),
    "trainer.lr_final": ("trainer.lr_schedule=cosine", "trainer.lr_schedule=constant"),
    "trainer.warmup_steps": ("schedule.iterations=2000000",),
    "trainer.zero_stage": ("trainer.backend=deepspeed",),
    "trainer.replicas": ("trainer.backend=fsdp2; trainer.ranks=4096",),
    "trainer.cpu_offload": ("trainer.backend=fsdp2",),
    "trainer.micro_batch_tokens": ("model.max_length=16; rollout.max_new_tokens=4; evaluation.max_new_tokens=4",),
    "trainer.head_chunk_tokens": ("trainer.micro_batch_tokens=2000000",),
    "trainer.weights_every": ("{sglang}",),
    "inference.engine": ("{sglang}",),
    "inference.tensor_parallel": ("{sglang}",),
    "inference.nodes": ("{sglang}; inference.tensor_parallel=64",),
    "inference.memory_fraction": ("{sglang}",),
    "inference.first_port": ("{sglang}",),
    "inference.release_memory": ("{sglang}",),
    "inference.transport": ("{sglang}",),
    "launcher.type": ("{sglang}",),
    "evaluation.every": ("evaluation={}",),
    "evaluation.samples": ("evaluation.temperature=1",),
    "evaluation.max_new_tokens": ("model.max_length=200000; trainer.micro_batch_tokens=200000",),
}
SGLANG = "inference={engine: sglang}; launcher.type=local"
#: Why a value can only be had in another recipe.
NOT_HERE = (
    "a scratch model has no chat template",
    "both path and scratch are given",
    "in an evaluate recipe",
    "only SGLang uses it",
    "without launcher.type ray",
    "without launcher.network",
    "cannot be split evenly",
)


@dataclass(frozen=True)
class Case:
    """One field at one of its bounds, or one of its choices."""

    field: str
    value: Any

    @property
    def override(self) -> str:
        return f"{self.field}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


def leaves(model: type[Section], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if (inner := nested_section(info)) is not None:
            yield from leaves(inner, f"{before}{name}.")
        else:
            yield f"{before}{name}", info


def bounds(info: FieldInfo) -> list[float]:
    """The least and the greatest number that a field takes."""
    found = []
    for limit in info.metadata:
        for name, side in (("ge", 0), ("le", 0), ("gt", 1), ("lt", -1)):
            if (value := getattr(limit, name, None)) is not None:
                beyond = value + side if info.annotation is int else math.nextafter(value, side * math.inf)
                found.append(beyond if side else value)
    return found


def values(info: FieldInfo) -> list[Any]:
    if get_origin(info.annotation) is Literal:
        return list(get_args(info.annotation))
    if info.annotation is bool:
        return [True, False]
    return bounds(info) if info.annotation in (int, float) else []


@cache
def cases(kind: type[Section]) -> list[Case]:
    return [Case(field, value) for field, info in leaves(kind) if field != "flow" for value in values(info)]


def test_every_number_has_both_bounds() -> None:
    for kind in RECIPES.values():
        for field, info in leaves(kind):
            if info.annotation in (int, float):
                assert len(bounds(info)) == 2, field


# ── what needs no engine ────────────────────────────────────────────────────────────────────────────────────────────


def exercise(recipe: Recipe) -> None:
    """Everything that a run of this recipe computes before and around its engines."""
    plan_all(recipe)
    place_all(recipe)
    with one_thread():
        if not isinstance(recipe, EvaluateRecipe):
            train_a_little(recipe)
        if isinstance(recipe, RlhfRecipe):
            learn_from_rewards(recipe)
    if isinstance(recipe, RlhfRecipe):
        watch = AlertMonitor(recipe.alerts)
        for reward in (0.0, 1.0, 0.0):
            watch({"verify": {"reward": reward, "timeout": 0.1}, "train": {"kl": reward, "logprob_gap_mean": 0.0}})


def plan_all(recipe: Recipe) -> None:
    last = iterations(recipe) - 1
    for k in (0, last):
        for stage in iteration_plan(recipe, k).stages:
            assert recipe_values(recipe, stage.fields) or not stage.fields
    assert not isinstance(recipe, RlhfRecipe) or evaluates_at_end(recipe, last) == (recipe.evaluation.every > 0)


def place_all(recipe: Recipe) -> None:
    """Services find their GPUs, or the message names what asks for too many."""
    for visible in ((), GPUS[:1], GPUS):
        try:
            found = place_recipe(recipe, visible)
        except UserError as error:
            assert any(f"{part}." in str(error) for part in ("inference", "trainer")), error
        else:
            assert {*found.trainer, *(gpu for gpus in found.servers for gpu in gpus)} <= set(visible)


def train_a_little(recipe: RlhfRecipe | SftRecipe) -> None:
    """Batches, learning rates and optimizer steps; a weight whose gradient is 0, or tiny, stays finite."""
    options, total = recipe.trainer, read_settings(recipe.model_dump(mode="json")).total_steps
    rates = [learning_rate(step, total, options) for step in (0, total // 2, total - 1)]
    assert all(0 <= rate <= options.lr for rate in rates)
    decays = options.lr_schedule != "constant" and total > 1
    assert rates[-1] == pytest.approx(options.lr * (options.lr_final if decays else 1), rel=1e-12)
    lengths = torch.tensor([1, 2, min(recipe.model.max_length, 500)])
    micro = micro_batches(lengths, options.micro_batch_tokens, options.layout)
    assert sorted(set(micro.tolist())) == list(range(int(micro.max()) + 1))
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = make_optimizer([("weight", weight)], options)
    for rate in rates:
        weight.grad = torch.tensor([0.0, 1e-25, -1e-3, 1e3])
        clip_gradients([weight], options.max_grad_norm)
        step_at(optimizer, rate)
    assert torch.isfinite(weight).all()
    assert (weight.detach()[:2] - 1).abs().max() <= 3 * options.lr * (1 + options.weight_decay)


def learn_from_rewards(recipe: RlhfRecipe) -> None:
    """Sampling, advantages, and the loss of a few samples: all finite."""
    logits = torch.tensor([[0.0, 1.0, -30.0, 5.0]]).repeat(3, 1)
    temperature = torch.full((3,), recipe.rollout.temperature)
    tokens, logprobs = sample(logits, temperature, torch.tensor([0.0, 0.5, 1 - 2**-24]))
    assert torch.isfinite(logprobs).all() and int(tokens.max()) < 4
    size, reward, how = min(recipe.rollout.group_size, 4), recipe.reward, recipe.algorithm
    rewards = torch.tensor([reward.unparseable_reward, reward.unverified_reward, 1.0, 0.0][:size] * 2)
    groups, lengths = torch.arange(2).repeat_interleave(size), torch.ones(2 * size, dtype=torch.int64)
    kept = torch.ones(2 * size, dtype=torch.bool)
    policy, reference = torch.full((2 * size,), -1.0), torch.full((2 * size,), -2.0)
    penalty = kl_penalty(policy, reference, how.kl_coef) if how.kl == "reward" else None
    norms = how.reward_norm, how.advantage_norm
    found = grpo_advantages(rewards, groups, lengths, kept, *norms, penalty, how.std_unbiased)
    assert torch.isfinite(found.advantages).all() and torch.isfinite(found.shaped_reward).all()
    assert int(minibatches(kept, how.minibatches, recipe.seed, 0).max()) < how.minibatches
    columns = {"behaviour": policy, "advantages": found.advantages, "reference": reference}
    objective = grpo_objective(columns, read_settings(recipe.model_dump(mode="json")))
    assert torch.isfinite(objective(policy + 0.1, torch.zeros_like(policy), torch.arange(2 * size))).all()
    make_sequences(torch.arange(2 * size), kept, lengths)


def read_prompts(recipe: Recipe) -> None:
    """The data set's rows as token ids of a small tokenizer; too long ones are refused by name, or left out."""
    if not recipe.data.source.startswith("sums://"):
        return
    tokenizer = character_tokenizer("0123456789+=", recipe.model.max_length)
    for table, split in splits(recipe).items():
        try:
            rows = load_rows(recipe.data.model_copy(update={"limit": recipe.data.limit or 50}), split)
            render_prompts(rows, recipe.data, tokenizer, recipe.model.max_length, new_tokens(recipe, table))
        except UserError as error:
            assert "model.max_length" in str(error), error


# ── every bound ─────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(values: dict[str, Any], *overrides: str) -> Recipe | str:
    """The recipe with these fields changed, or why it is refused."""
    usable = [override for override in overrides if _is_field(values, override.partition("=")[0])]
    try:
        return parse_recipe(apply_overrides(values, usable), "x")
    except UserError as error:
        return str(error)


def _is_field(values: dict[str, Any], name: str) -> bool:
    """Whether this flow's recipe has the field or section."""
    return any(field == name or field.startswith(f"{name}.") for field, _ in leaves(RECIPES[values["flow"]]))


def names_fields(message: str) -> bool:
    """Whether each line of a refusal, but its title, begins with a field or a section."""
    known = {f"  - {known}" for kind in RECIPES.values() for name, _ in leaves(kind) for known in _with_sections(name)}
    return all(line.partition(":")[0] in known for line in message.splitlines()[1:])


def _with_sections(field: str) -> list[str]:
    return [field.rsplit(".", n)[0] for n in range(field.count(".") + 1)]


@cache
def shipped(name: str) -> dict[str, Any]:
    return load_recipe(name).model_dump(mode="json", exclude_unset=True)


@pytest.mark.parametrize("name", [pytest.param(name, marks=OTHERS if name in LIKE else ()) for name in list_recipes()])
def test_a_shipped_recipe_at_every_bound_is_refused_by_name_or_planned(name: str) -> None:
    values = shipped(name)
    for case in cases(RECIPES[values["flow"]]):
        found = outcome(values, case.override)
        if isinstance(found, str):
            assert names_fields(found), (case, found)
        else:
            plan_all(found)
            place_all(found)


def with_companions(values: dict[str, Any], case: Case) -> Recipe | str:
    """The recipe at a bound; if it is refused as it is, with what the bound needs to have an effect."""
    found = outcome(values, case.override)
    for companions in COMPANIONS.get(case.field, ()):
        if isinstance(found, str):
            found = outcome(values, *companions.replace("{sglang}", SGLANG).split("; "), case.override)
    return found


@pytest.mark.parametrize("name", ["quickstart", "quickstart-sft", "evaluate-gsm8k-cpu"])
def test_at_every_bound_what_needs_no_engine_runs(name: str) -> None:
    values = shipped(name)
    if name == "quickstart":
        values = apply_overrides(values, ["model.warm_start=", "model.scratch={}"])
    for case in cases(RECIPES[values["flow"]]):
        found = with_companions(values, case)
        if isinstance(found, str):
            assert names_fields(found) and any(reason in found for reason in NOT_HERE), (case, found)
            continue
        exercise(found)
        if case.field.startswith("data.") or case.field.endswith(("max_length", "max_new_tokens")):
            read_prompts(found)


PAIRS = st.lists(st.integers(0, 10**6), min_size=2, max_size=5)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["quickstart", "quickstart-sft", "gsm8k", "gsm8k-cpu", "evaluate-gsm8k"]), chosen=PAIRS)
def test_any_bounds_together_are_refused_by_name_or_planned(name: str, chosen: list[int]) -> None:
    values = shipped(name)
    known = cases(RECIPES[values["flow"]])
    found = outcome(values, *(known[number % len(known)].override for number in chosen))
    if isinstance(found, str):
        assert names_fields(found), found
    else:
        exercise(found)
