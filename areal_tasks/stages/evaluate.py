"""evaluate: completions of the held-out split and their verdicts, for one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import pyarrow as pa

from areal_tasks.engines.client import InferenceClient
from areal_tasks.rewards.load import verifier_version
from areal_tasks.rollout.judging import BatchedVerifier, Verdicts
from areal_tasks.rollout.prompts import PROMPT_COLUMNS, workflow_context
from areal_tasks.rollout.worker.apart import IsolatedWorkflow, in_time
from areal_tasks.stages.generation import ENGINE_FIELDS, check_versions, sizes_of
from areal_tasks.stages.progress import reported
from areal_tasks.stages.prompts import dropped_eval_prompts
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from areal_tasks.stages.verify import check_failures, judge, mean_reward, verdict_shares, verify_table
from areal_tasks.store.runs import CommittedStage
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Prompt, Sample, WorkflowContext, load_workflow, samples_to_table
from schemas.manifest import InputRef
from schemas.recipe.derived import judges_groups
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.tables import EVALUATE, ROLLOUT


def evaluate(recipe: RlhfRecipe | EvaluateRecipe) -> Stage:
    """One row per completion, with its verdict and the version that was evaluated."""
    return Stage(
        name="evaluate",
        kind=Kind.GENERATE,
        version=verifier_version(recipe.reward.verifier),
        run=run,
        reads=columns("eval_prompts", *PROMPT_COLUMNS),
        writes=("evaluate",),
        fields=("evaluation", "workflow", "reward", *ENGINE_FIELDS),
        carries=("weights",),
        after=("rollout",),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Generates completions (or takes the replayed run's), judges them, and computes accuracy and reward."""
    recipe = context.recipe
    assert isinstance(recipe, (RlhfRecipe, EvaluateRecipe))
    label = f"evaluate version {context.weights.version}"
    source = context.recorded.rejudged() if context.recorded else None
    samples = recorded_samples(context, source) if source else generated_samples(context, inputs, label)
    with context.engines.judging(len(samples)):
        results = judge(context.engines.verifiers, samples, label)
    shares = verdict_shares(results)
    check_failures(results, recipe.reward)
    table = joined(samples, verify_table(samples["sample_id"], results), context.weights.version)
    accuracy = {"accuracy": shares["correct"], "reward": mean_reward(results)}
    dropped = dropped_eval_prompts(inputs.manifests["prompts"])
    also_read = (InputRef(path=source.ref.path, digest=source.ref.digest),) if source else ()
    generated, truncated = (sum(samples[name].to_pylist()) for name in ("num_generated", "truncated"))
    sizes = sizes_of(len(samples), generated, truncated)
    return Output({"evaluate": table}, {**accuracy, **sizes, **shares, **dropped}, also_read)


def generated_samples(context: Context, inputs: Inputs, label: str) -> pa.Table:
    """Completions of the held-out prompts by the weights that are evaluated, as a `ROLLOUT` table."""
    servers = context.engines.servers
    with servers.held(context.held) if context.held else nullcontext(servers.inference()) as client:
        return generated_by(client, context, inputs, label)


def generated_by(client: InferenceClient, context: Context, inputs: Inputs, label: str) -> pa.Table:
    """The same by the servers of this client, which hold these weights."""
    recipe, engines = context.recipe, context.engines
    assert isinstance(recipe, (RlhfRecipe, EvaluateRecipe))
    sampling, rows = recipe.evaluation, inputs.read(context, "eval_prompts").to_pylist()
    prompts = [Prompt(group_id=row["prompt_id"], epoch=0, **row) for row in rows]
    settings = workflow_context(recipe, sampling, sampling.samples, client, engines.tokenizer)
    if judges_groups(recipe):
        settings = replace(settings, verify=Verdicts(BatchedVerifier(engines.verifiers.verify)))
    workflow = load_workflow(recipe.workflow.name, recipe.workflow.arguments)
    isolated = IsolatedWorkflow(workflow, recipe.workflow.blocked_seconds)
    done: list[Prompt] = []
    with reported(label, "samples", lambda: (len(done) * sampling.samples, len(prompts) * sampling.samples)):
        groups = run_groups(isolated, prompts, settings, sampling.group_seconds, done.append)
        samples = engines.servers.call(groups, generates=client)
    check_versions(client, context.weights.version)
    return samples_to_table(samples)


async def run_groups(
    workflow: IsolatedWorkflow,
    prompts: Sequence[Prompt],
    context: WorkflowContext,
    seconds: float,
    report: Callable[[Prompt], object] = lambda prompt: None,
) -> list[Sample]:
    """The samples of all groups, in the order of the prompts; `report` is called for each finished group.

    A group that fails or blocks ends all others, and so do `seconds` without a finished group. (How long a group waits
    for a free server is not limited.)
    """

    async def group(prompt: Prompt) -> list[Sample]:
        samples = await workflow.run(prompt, context)
        report(prompt)
        return samples

    groups = [asyncio.ensure_future(group(prompt)) for prompt in prompts]
    try:
        for done in asyncio.as_completed(groups):
            await in_time(done, seconds, "evaluation.group_seconds")
        return list(chain.from_iterable(task.result() for task in groups))
    finally:
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)  # the thread ends after its groups
        workflow.close()


def recorded_samples(context: Context, source: CommittedStage) -> pa.Table:
    """The recorded completions without their verdicts."""
    return read_table(context.store, source.manifest.tables["evaluate"], ROLLOUT.names)


def joined(samples: pa.Table, verdicts: pa.Table, version: int) -> pa.Table:
    """The rows of `EVALUATE`; both tables hold the same samples in the same order."""
    both = {name: table[name] for table in (samples, verdicts) for name in table.column_names}
    both["weights_version"] = pa.chunked_array([pa.array([version] * len(samples), pa.int32())])
    return pa.table(both).select(EVALUATE.names).cast(EVALUATE)
