"""The recipes of the three flows. Checks that need more than one field are in `schemas.recipe.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from schemas.recipe.checks import BASE_CHECKS, EVALUATION_CHECKS, GRPO_CHECKS, TRAINING_CHECKS, refuse_problems
from schemas.recipe.fields import Section, section, semantic
from schemas.recipe.launcher import Launcher
from schemas.recipe.sections import (
    Alerts,
    Data,
    Evaluation,
    Inference,
    Model,
    Reward,
    Rollout,
    Schedule,
    StoreSettings,
    Workflow,
)
from schemas.recipe.training import Grpo, Sft, Trainer

FLOW = "The flow that runs this recipe."


class BaseRecipe(Section):
    """The fields that every flow has."""

    CHECKS: ClassVar[tuple[Callable[[Any], Iterable[str]], ...]] = BASE_CHECKS

    name: str = Field(
        description="Name of the recipe, and of its runs unless `run` names them.", pattern=r"^[a-z0-9][a-z0-9._-]*$"
    )
    flow: Literal["rlhf", "sft", "evaluate"] = Field(description=FLOW)
    seed: int = semantic(1, ge=0, lt=2**31, description="Seed of the run: prompt order, sampling, initial weights.")
    model: Model = Field(description="Initial weights and tokenizer.")
    data: Data = Field(description="Prompts and answers.")
    store: StoreSettings = section(StoreSettings, "Where everything is stored.")
    launcher: Launcher = section(Launcher, "Where services run.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_problems(self, self.CHECKS)
        return self


class RlhfRecipe(BaseRecipe):
    """Reinforcement learning from verified rewards: rollout → verify → advantage → train → publish."""

    CHECKS = (*BASE_CHECKS, *TRAINING_CHECKS, *EVALUATION_CHECKS, *GRPO_CHECKS)

    flow: Literal["rlhf"] = Field("rlhf", description=FLOW)
    rollout: Rollout = section(Rollout, "Sampling.")
    workflow: Workflow = section(Workflow, "How one sample is produced.")
    reward: Reward = section(Reward, "How a completion is judged.")
    algorithm: Grpo = section(Grpo, "GRPO.")
    trainer: Trainer = section(Trainer, "The optimizer.")
    inference: Inference = section(Inference, "The servers that generate.")
    evaluation: Evaluation = section(Evaluation, "Accuracy on the held-out split.")
    alerts: Alerts = section(Alerts, "When the run warns.")
    schedule: Schedule = section(Schedule, "How long the run is.")


class SftRecipe(BaseRecipe):
    """Supervised fine-tuning: batch → train → publish."""

    CHECKS = (*BASE_CHECKS, *TRAINING_CHECKS)

    flow: Literal["sft"] = Field("sft", description=FLOW)
    algorithm: Sft = section(Sft, "Batches of demonstrations.")
    trainer: Trainer = section(Trainer, "The optimizer.")
    schedule: Schedule = section(Schedule, "How long the run is.")


class EvaluateRecipe(BaseRecipe):
    """Evaluation of one set of weights on the held-out split."""

    CHECKS = (*BASE_CHECKS, *EVALUATION_CHECKS)

    flow: Literal["evaluate"] = Field("evaluate", description=FLOW)
    workflow: Workflow = section(Workflow, "How one sample is produced.")
    reward: Reward = section(Reward, "How a completion is judged.")
    inference: Inference = section(Inference, "The servers that generate.")
    evaluation: Evaluation = section(Evaluation, "What is measured.")


Recipe = RlhfRecipe | SftRecipe | EvaluateRecipe
