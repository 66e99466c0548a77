"""A group's prompt and its workflow's context, which do not depend on the worker that generates the group."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from areal_tasks.data.sampler import position, row_of_group
from areal_tasks.engines.client import InferenceClient
from areal_tasks.workflows import Prompt, WorkflowContext
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.recipe.sections import Evaluation, Rollout

#: The columns of `prompts` that a group reads.
PROMPT_COLUMNS: Final = ("prompt_id", "prompt", "answer", "input_ids")


def prompt_of_group(table: pa.Table, group: int, seed: int, order: int) -> Prompt:
    """The prompt of a group: a pure function of the run's seed and order, and the group's number."""
    [row] = table.slice(row_of_group(group, len(table), seed, order), 1).to_pylist()
    return Prompt(group_id=group, epoch=position(group, len(table))[0], **row)


def workflow_context(
    recipe: RlhfRecipe | EvaluateRecipe,
    sampling: Rollout | Evaluation,
    group_size: int,
    client: InferenceClient,
    tokenizer: Any,
) -> WorkflowContext:
    """The context in which the recipe's workflow produces groups of `group_size` samples."""
    return WorkflowContext(
        client=client,
        seed=recipe.seed,
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        max_length=recipe.model.max_length,
        stop=tuple(sampling.stop),
        tokenizer=tokenizer,
    )
