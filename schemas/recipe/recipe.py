"""The recipes of the three flows. Checks that need more than one field live in `schemas.recipe.checks`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.recipe.fields import Section, section, semantic
from schemas.recipe.sections import (
    Data,
    Evaluation,
    Grpo,
    Inference,
    Launcher,
    Model,
    Reward,
    Rollout,
    Schedule,
    Sft,
    StoreSettings,
    Trainer,
    Workflow,
)


class BaseRecipe(Section):
    """What every flow needs."""

    name: str = Field(description="Name of the recipe, and of its runs unless told otherwise.", pattern=r"^[a-z0-9][a-z0-9._-]*$")
    seed: int = semantic(1, ge=0, lt=2**31, description="Seed of the run: prompt order, sampling, initial weights.")
    model: Model = Field(description="Initial weights and tokenizer.")
    data: Data = Field(description="Prompts and answers.")
    store: StoreSettings = section(StoreSettings, "Where everything lies.")
    launcher: Launcher = section(Launcher, "Where services run.")


class RlhfRecipe(BaseRecipe):
    """Reinforcement learning from verified rewards: rollout → verify → advantage → train → publish."""

    flow: Literal["rlhf"] = Field("rlhf", description="The flow that runs this recipe.")
    rollout: Rollout = section(Rollout, "Sampling.")
    workflow: Workflow = section(Workflow, "How one sample is produced.")
    reward: Reward = section(Reward, "How a completion is judged.")
    algorithm: Grpo = section(Grpo, "GRPO.")
    trainer: Trainer = section(Trainer, "The optimizer.")
    inference: Inference = section(Inference, "The servers that generate.")
    evaluation: Evaluation = section(Evaluation, "Accuracy on the held-out split.")
    schedule: Schedule = section(Schedule, "How long.")


class SftRecipe(BaseRecipe):
    """Supervised fine-tuning: batch → train → publish."""

    flow: Literal["sft"] = Field("sft", description="The flow that runs this recipe.")
    algorithm: Sft = section(Sft, "Batches of demonstrations.")
    trainer: Trainer = section(Trainer, "The optimizer.")
    schedule: Schedule = section(Schedule, "How long.")


class EvaluateRecipe(BaseRecipe):
    """Evaluation of one set of weights on the held-out split."""

    flow: Literal["evaluate"] = Field("evaluate", description="The flow that runs this recipe.")
    workflow: Workflow = section(Workflow, "How one sample is produced.")
    reward: Reward = section(Reward, "How a completion is judged.")
    inference: Inference = section(Inference, "The servers that generate.")
    evaluation: Evaluation = section(Evaluation, "What is measured.")


Recipe = RlhfRecipe | SftRecipe | EvaluateRecipe
