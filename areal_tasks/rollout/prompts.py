"""A group's prompt and its workflow's context, which do not depend on the worker that generates the group."""

from __future__ import annotations

import sys
from typing import Any, Final

import pyarrow as pa

from areal_tasks.data.sampler import position, row_of_group
from areal_tasks.engines.client import InferenceClient
from areal_tasks.workflows import Prompt, WorkflowContext
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.recipe.sections import Filters, Rollout

#: The columns of `prompts` that a group reads.
PROMPT_COLUMNS: Final = ("prompt_id", "prompt", "answer", "input_ids")


def prompt_of_group(table: pa.Table, group: int, seed: int, order: int) -> Prompt:
    """The prompt of a group: a pure function of the run's seed and order, and the group's number."""
    [row] = table.slice(row_of_group(group, len(table), seed, order), 1).to_pylist()
    return Prompt(group_id=group, epoch=position(group, len(table))[0], **row)


def held_out_prompts(table: pa.Table) -> dict[int, Prompt]:
    """The prompts of an evaluation's groups, which have the numbers of the rows that the prompts come from."""
    return {row["prompt_id"]: Prompt(group_id=row["prompt_id"], epoch=0, **row) for row in table.to_pylist()}


def evaluation_rollout(recipe: RlhfRecipe | EvaluateRecipe) -> Rollout:
    """How the groups of an evaluation are generated. Each is needed, so that one that fails ends the evaluation."""
    sampling = recipe.evaluation
    settings = recipe.rollout if isinstance(recipe, RlhfRecipe) else Rollout()
    return settings.model_copy(  # without its checks: training allows no temperature of 0
        update={
            **sampling.model_dump(include={"max_new_tokens", "temperature", "stop", "group_seconds"}),
            "group_size": sampling.samples,
            "max_failed_groups": 0,
            "filters": Filters(),
            "pace": None,
            "groups_in_memory": sys.maxsize,  # they stay in memory until they are taken
            "worker_memory_mb": 0,  # what a worker that ends has finished would be lost
        }
    )


def workflow_context(
    recipe: RlhfRecipe | EvaluateRecipe, sampling: Rollout, client: InferenceClient, tokenizer: Any
) -> WorkflowContext:
    """The context in which the recipe's workflow produces groups."""
    return WorkflowContext(
        client=client,
        seed=recipe.seed,
        group_size=sampling.group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        max_length=recipe.model.max_length,
        stop=tuple(sampling.stop),
        tokenizer=tokenizer,
    )
