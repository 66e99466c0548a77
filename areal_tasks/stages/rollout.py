"""rollout: the iteration's prompts, and `group_size` completions of each, sampled by the inference servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

import pyarrow as pa

from areal_tasks.data.sampler import position, row_of_group
from areal_tasks.engines.client import InferenceClient
from areal_tasks.stages.context import Context, groups_consumed
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from areal_tasks.workflows import Prompt, Sample, Workflow, WorkflowContext, load_workflow, samples_to_table
from schemas.errors import UserError
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.recipe.sections import Evaluation, Rollout

PROMPT_COLUMNS = ("prompt_id", "prompt", "answer", "input_ids")
ENGINE_FIELDS = (
    *("model.dtype", "model.max_length", "inference.engine", "inference.flags"),
    *("inference.deterministic", "inference.slots"),
)


def rollout(recipe: RlhfRecipe) -> Stage:
    """One row per completion: its tokens, their log-probabilities and the weights version of each."""
    return Stage(
        name="rollout",
        kind=Kind.GENERATE,
        version=1,
        run=run,
        reads=columns("prompts", *PROMPT_COLUMNS),
        writes=("rollout",),
        fields=("rollout", "workflow", *ENGINE_FIELDS),
        carries=("weights",),
        source=True,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    recipe = context.recipe
    assert isinstance(recipe, RlhfRecipe)
    groups = range(context.next_group, context.next_group + groups_consumed(recipe))
    prompts = prompts_of_groups(inputs.read(context, "prompts"), groups, recipe.seed, context.run.record.order)
    table = generate(context, prompts, recipe.rollout, recipe.rollout.group_size, f"rollout {context.iteration}")
    return Output({"rollout": table}, summary(table))


def prompts_of_groups(table: pa.Table, groups: Sequence[int], seed: int, order: int) -> list[Prompt]:
    """The prompt of each group: a pure function of the run's seed and order, and the group's number."""
    rows = table.take([row_of_group(group, len(table), seed, order) for group in groups]).to_pylist()
    return [
        Prompt(group_id=group, epoch=position(group, len(table))[0], **row)
        for group, row in zip(groups, rows, strict=True)
    ]


def generate(
    context: Context, prompts: Sequence[Prompt], sampling: Rollout | Evaluation, group_size: int, label: str
) -> pa.Table:
    """The workflow's samples as a `ROLLOUT` table; the log says under `label` how far it is.

    Raises:
        UserError: the servers hold other weights than those this iteration is about.
    """
    recipe, client = context.recipe, context.engines.inference()
    assert isinstance(recipe, (RlhfRecipe, EvaluateRecipe))
    settings = WorkflowContext(
        client=client,
        seed=recipe.seed,
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        max_length=recipe.model.max_length,
        stop=tuple(sampling.stop),
        tokenizer=context.engines.tokenizer,
    )
    work = run_groups(load_workflow(recipe.workflow.name, recipe.workflow.arguments), prompts, settings)
    before, samples = client.finished, len(prompts) * group_size
    with reported(label, "samples", lambda: (min(samples, client.finished - before), samples)):
        table = samples_to_table(context.engines.call(work, generates=True))
    check_versions(client, context.weights.version)
    return table


async def run_groups(workflow: Workflow, prompts: Sequence[Prompt], context: WorkflowContext) -> list[Sample]:
    """The samples of all groups, in the order of the prompts. A group that fails ends the others."""
    groups = [asyncio.ensure_future(workflow.run(prompt, context)) for prompt in prompts]
    try:
        return list(chain.from_iterable(await asyncio.gather(*groups)))
    finally:
        for group in groups:
            group.cancel()


def check_versions(client: InferenceClient, expected: int) -> None:
    """Raises UserError if the servers hold other weights than those this iteration is about."""
    if client.version not in (None, expected):
        raise UserError(f"the servers hold version {client.version} of the weights, not {expected}")


def summary(table: pa.Table) -> dict[str, float]:
    """Samples, generated tokens, their mean, and the share that was cut off."""
    generated = table["num_generated"].to_pylist()
    truncated = table["truncated"].to_pylist()
    return {
        "samples": float(len(generated)),
        "tokens": float(sum(generated)),
        "mean_tokens": sum(generated) / max(len(generated), 1),
        "truncated": sum(truncated) / max(len(truncated), 1),
    }
