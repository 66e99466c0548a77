"""evaluate: completions of the held-out split and their verdicts, for one version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import ServerDown
from areal_tasks.rewards.load import verifier_version
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.judging import verdict_table
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.made_with import ENGINE_FIELDS
from areal_tasks.rollout.orders import Written
from areal_tasks.rollout.prompts import PROMPT_COLUMNS, evaluation_rollout
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.spooling import Spool
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.stages.generation import check_versions, in_loop, order_of, sizes_of
from areal_tasks.stages.progress import reported
from areal_tasks.stages.prompts import dropped_eval_prompts
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from areal_tasks.stages.verify import check_failures, judge, mean_reward, verdict_shares
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.shards import read_table
from schemas.manifest import InputRef
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.tables import EVALUATE, ROLLOUT, VERIFY

NOT_SPOOLED: Final = ""  # what the groups of an evaluation are made with: none goes to the spool
AT_ONCE: Final = 64  # finished groups that the worker writes at a time: an end of its process costs no more of them


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
    if source:
        samples = read_table(context.store, source.manifest.tables["evaluate"], ROLLOUT.names)  # without verdicts
    else:
        servers = context.engines.servers
        with servers.held(context.held) if context.held else nullcontext(servers.inference()) as client:
            samples = generated_by(client, context, inputs, label)
    with context.engines.judging(len(samples)):
        results = judge(context.engines.verifiers, samples, label)
    shares = verdict_shares(results)
    check_failures(results, recipe.reward)
    table = joined(
        samples,
        verdict_table(VERIFY, {"sample_id": samples["sample_id"].to_pylist()}, results),
        context.weights.version,
    )
    accuracy = {"accuracy": shares["correct"], "reward": mean_reward(results)}
    dropped = dropped_eval_prompts(inputs.manifests["prompts"])
    also_read = (InputRef(path=source.ref.path, digest=source.ref.digest),) if source else ()
    generated, truncated = (sum(samples[name].to_pylist()) for name in ("num_generated", "truncated"))
    sizes = sizes_of(len(samples), generated, truncated)
    return Output({"evaluate": table}, {**accuracy, **sizes, **shares, **dropped}, also_read)


def generated_by(client: InferenceClient, context: Context, inputs: Inputs, label: str) -> pa.Table:
    """Completions of the held-out prompts, as a `ROLLOUT` table: a rollout worker has the client's servers generate.

    They hold the weights that are evaluated.
    """
    servers, rollouts, version = context.engines.servers, evaluation(client, context, inputs), context.weights.version
    tracker, size, samples = rollouts.tracker, rollouts.limits.group_size, ROLLOUT.empty_table()
    wanted = tracker.rule.capacity(version, tracker.rule.last)
    servers.evaluators.serve(rollouts)
    try:
        with reported(label, "samples", lambda: (len(samples) + tracker.ready() * size, wanted * size)):
            while tracker.next <= tracker.rule.last:
                prefix = paths.stage_attempt(context.run.name, context.iteration, "evaluate", new_attempt())
                some = taken(context.store, servers.call(rollouts.take(prefix), generates=client))
                servers.call(in_loop(partial(rollouts.consume, some["group_id"].unique().to_pylist())))
                samples = pa.concat_tables([samples, some])
    finally:
        servers.evaluators.end(rollouts)
    check_versions(client, version)
    if (newest := pc.max(pc.list_flatten(samples["versions"])).as_py() or 0) > version:
        raise ServerDown(f"a server has generated with version {newest} of the weights, expected {version}")
    return samples.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def evaluation(client: InferenceClient, context: Context, inputs: Inputs) -> Rollouts:
    """The groups of an evaluation. `AT_ONCE` of them are taken at a time, all of the version that is evaluated."""
    recipe, run, version = context.recipe, context.run, context.weights.version
    assert isinstance(recipe, (RlhfRecipe, EvaluateRecipe))
    groups = set(inputs.read(context, "eval_prompts")["prompt_id"].to_pylist())
    sizes = [min(AT_ONCE, len(groups) - start) for start in range(0, len(groups), AT_ONCE)]
    rule = Staleness(lambda k: k - version, version + len(sizes) - 1, lambda k: sizes[k - version])
    left_out = set(range(max(groups, default=0))) - groups
    tracker = GroupTracker(rule, version, SettledGroups().add(left_out))
    spool = Spool(run.store, run.name, run.owner, NOT_SPOOLED)
    order = order_of(context, client, inputs.ref("eval_prompts"), NOT_SPOOLED, evaluates=True)
    access, limits = context.engines.supervisor.access, evaluation_rollout(recipe)
    return Rollouts(tracker, client, order, lambda url, flow: Link(url, access, flow), limits, spool)


def taken(store: Store, parts: Sequence[Written]) -> pa.Table:
    """The samples that a worker has written. The stage commits them with their verdicts, so these files are removed."""
    tables = [read_table(store, part.tables["rollout"]) for part in parts]
    for table in chain.from_iterable(part.tables.values() for part in parts):
        for shard in table.shards:
            store.remove(shard.path)
    return pa.concat_tables(tables)


def joined(samples: pa.Table, verdicts: pa.Table, version: int) -> pa.Table:
    """The rows of `EVALUATE`; both tables hold the same samples in the same order."""
    both = {name: table[name] for table in (samples, verdicts) for name in table.column_names}
    both["weights_version"] = pa.chunked_array([pa.array([version] * len(samples), pa.int32())])
    return pa.table(both).select(EVALUATE.names).cast(EVALUATE)
