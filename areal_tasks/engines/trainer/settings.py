"""The trainer's settings, read from a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from areal_tasks.algorithms.behaviour import Bound
from areal_tasks.algorithms.losses import LossMean
from schemas.errors import UserError
from schemas.recipe.derived import is_decoupled, needs_proximal
from schemas.recipe.recipe import RlhfRecipe, SftRecipe
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

AT_MOST_1: Final = Bound("cap", 1.0)


@dataclass(frozen=True)
class Settings:
    """The trainer's view of a recipe."""

    kind: Literal["grpo", "sft"]
    seed: int
    trainer: Trainer
    model: Model
    temperature: float
    minibatches: int  # optimizer steps per iteration
    total_steps: int  # optimizer steps of the whole run, with whose last the learning-rate decay ends
    mean: LossMean
    clip_ratio: float = 0.0
    kl_coef: float = 0.0  # of the KL term in the loss
    behaviour: Bound = AT_MOST_1
    sequence_weights: bool = False  # the behaviour weight is that of the whole sample
    log_ratio_limit: float = math.inf  # nats
    max_logprob_gap: float = math.inf
    makes_room: bool = False  # release cached GPU memory after a command, for servers that then take theirs back
    own_proximal: bool = False  # without a table `proximal`: the step's own forward pass, not the behaviour policy
    max_lag: float | None = None  # by how many versions a token may be older; none: it cannot be older


def read_settings(recipe: dict[str, Any]) -> Settings:
    """Settings of an `rlhf` or `sft` recipe. UserError: it is of another flow."""
    if recipe.get("flow") == "sft":
        sft = SftRecipe.model_validate(recipe)
        return Settings(
            kind="sft",
            seed=sft.seed,
            trainer=sft.trainer,
            model=sft.model,
            temperature=1.0,
            minibatches=sft.algorithm.steps,
            total_steps=sft.schedule.iterations * sft.algorithm.steps,
            mean="token_mean",
        )
    if recipe.get("flow") == "rlhf":
        return _grpo_settings(RlhfRecipe.model_validate(recipe))
    raise UserError(f"flow {recipe.get('flow')!r} has nothing to train: start a trainer for rlhf or sft only")


def _grpo_settings(recipe: RlhfRecipe) -> Settings:
    algorithm, eta = recipe.algorithm, float(recipe.rollout.max_head_offpolicyness)
    return Settings(
        kind="grpo",
        seed=recipe.seed,
        trainer=recipe.trainer,
        model=recipe.model,
        temperature=recipe.rollout.temperature,
        minibatches=algorithm.minibatches,
        total_steps=recipe.schedule.iterations * algorithm.minibatches,
        mean=algorithm.loss,
        clip_ratio=algorithm.clip_ratio,
        kl_coef=algorithm.kl_coef if algorithm.kl == "loss" else 0.0,
        behaviour=Bound("cap", algorithm.tis_cap)
        if algorithm.tis_bound == "cap"
        else Bound("mask", algorithm.tis_high, algorithm.tis_low),
        sequence_weights=is_decoupled(recipe) and algorithm.tis_level == "sequence",
        log_ratio_limit=algorithm.max_log_ratio or math.inf,
        max_logprob_gap=algorithm.max_logprob_gap,
        makes_room=recipe.inference.release_memory,
        own_proximal=is_decoupled(recipe) and not needs_proximal(recipe),
        max_lag=(eta if recipe.rollout.bound == "strict" else math.inf) if eta else None,
    )
