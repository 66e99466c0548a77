"""Builds one stage of one iteration: reuses what is committed under its key, or runs the stage and commits the result.

Resume and replay need nothing else: they find earlier results by their keys, in this run or in the run that is
replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from areal_tasks.code_digests import code_values
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage
from areal_tasks.store import paths
from areal_tasks.store.commit import commit_once, new_attempt
from areal_tasks.store.keys import combine_digests, recipe_values, stage_key
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import CommittedStage, stage_ref
from areal_tasks.store.shards import write_table
from schemas.manifest import InputRef, IterationCommit, StageManifest, StageRef, TableRef


@dataclass(frozen=True)
class PrefectIds:
    """The flow run and task run that build a stage; empty without Prefect."""

    flow_run: str = ""
    task_run: str = ""


@dataclass(frozen=True)
class Built:
    """A committed stage, whether it was reused, and the reference by which a commit names it.

    `label`: the name of its task run in this iteration, whether there was one or not.
    """

    label: str
    manifest: StageManifest
    ref: StageRef
    reused: bool

    def recorded(self, context: Context) -> bool:
        """Whether another run made it: the one that this run replays or was forked from."""
        return self.manifest.run != context.run.name


def build(stage: Stage, context: Context, inputs: Mapping[str, Built], ids: PrefectIds) -> Built:
    """The committed result of `stage` for this iteration's inputs, reused if its key is known, else built now."""
    given = _given(stage, context, inputs)
    built = _found(stage, context, given)
    if built is None:
        return _make(stage, context, given, ids)
    if stage.on_reuse is not None and context.engines.servers.generates:
        stage.on_reuse(context, given, built.manifest)
    return built


def find_built(stage: Stage, context: Context, inputs: Mapping[str, Built]) -> Built | None:
    """What `build` or `carried` would reuse; None if the stage would have to run. Uses no engine."""
    return carried(stage, context, inputs) or _found(stage, context, _given(stage, context, inputs))


def _given(stage: Stage, context: Context, inputs: Mapping[str, Built]) -> Inputs:
    given = Inputs({name: built.manifest for name, built in inputs.items()}, stage.reads)
    return replace(given, key=key_of(stage, context, given, _predecessors(stage, context)[0]))


def _found(stage: Stage, context: Context, inputs: Inputs) -> Built | None:
    """The result committed under the key, in this run or in the run that is replayed."""
    of_before = (key_of(stage, context, inputs, one) for one in _predecessors(stage, context)[1:])
    own = (context.run.find_stage(context.iteration, stage.name, key) for key in chain([inputs.key], of_before))
    found = next(filter(None, own), None) or _recorded(stage, context, inputs)
    return None if found is None else Built(stage.label(context), found.manifest, found.ref, reused=True)


def _recorded(stage: Stage, context: Context, inputs: Inputs) -> CommittedStage | None:
    """The result in the run that is replayed. The keys of its source stages contain what preceded them there."""
    recorded = context.recorded
    if recorded is None:
        return None
    trained = context.before("train")
    predecessors = recorded.predecessors(stage, trained.key if trained else "") if stage.source else [None]
    found = (recorded.find(stage.name, key_of(stage, context, inputs, one)) for one in predecessors)
    return next(filter(None, found), None)


def carried(stage: Stage, context: Context, inputs: Mapping[str, Built]) -> Built | None:
    """The result of a `once` stage that the previous commit, or a fork's parent, already names under the same key.

    A fork keeps what its parent began with, whatever it changes: a stage that reads nothing is not built again.
    """
    history = context.previous or (None if stage.reads else _beginning(context))
    if not stage.once or history is None:
        return None
    key = _given(stage, context, inputs).key
    known = (r for r in history.stages if r.stage == stage.name and (r.key == key or not stage.reads))
    ref = next(known, None)
    return None if ref is None else Built(stage.name, context.run.read_stage(ref), ref, reused=True)


def _beginning(context: Context) -> IterationCommit | None:
    """For a fork at iteration 0, its parent's iteration 0: both begin with the same. None if there is none."""
    parent = context.run.parent
    return parent.commit(0) if parent is not None and context.recorded is None and parent.head() is not None else None


def key_of(stage: Stage, context: Context, inputs: Inputs, predecessor: str | None) -> str:
    """The digest of the stage, the recipe fields it reads, the users' code that these name, its inputs' content, its
    carried state, and `predecessor`.

    `predecessor`: the digest of what precedes a source stage; None for other stages.
    """
    digests = [inputs.ref(table).digest for table in stage.inputs]
    if {"weights", "policy"} & set(stage.carries):
        digests.append(context.weights.digest)
    if "policy" in stage.carries and context.previous:
        digests += [ref.key for ref in context.previous.stages if ref.stage == "train"]
    values = recipe_values(context.recipe, stage.fields) | code_values(context.engines.code, stage.fields)
    return stage_key(stage.name, stage.version, values, digests, context.recipe.seed, predecessor)


def _predecessors(stage: Stage, context: Context) -> Sequence[str | None]:
    """The predecessor in the stage's key; then that in keys of earlier program versions, if it differs.

    A resumed run may have a result of an earlier version in its first iteration, and in no later one.
    """
    if not stage.source:
        return [None]
    before = context.before(stage.name) if stage.ahead else None
    if before is None:
        return [context.previous_digest]
    return [before.sha256] if context.uncommitted else [before.sha256, context.previous_digest]


def _make(stage: Stage, context: Context, inputs: Inputs, ids: PrefectIds) -> Built:
    run, attempt, started = context.run, new_attempt(), now()
    prefix = paths.stage_attempt(run.name, context.iteration, stage.name, attempt)
    output = stage.run(context, inputs, prefix)
    tables = _written(stage, context, output, prefix)
    manifest = StageManifest(
        run=run.name,
        iteration=context.iteration,
        stage=stage.name,
        attempt=attempt,
        key=inputs.key,
        digest=combine_digests({name: ref.digest for name, ref in tables.items()}),
        inputs=(
            *(InputRef(path=manifest_path(m), digest=m.digest) for m in inputs.manifests.values()),
            *output.also_read,
        ),
        tables=tables,
        metrics=dict(output.metrics),
        provenance=make_provenance(
            run.owner, started, prefect_flow_run_id=ids.flow_run, prefect_task_run_id=ids.task_run
        ),
    )
    path = manifest_path(manifest)
    winner, mine = commit_once(context.store, path, manifest)
    if not mine and stage.kind is Kind.TRAIN_STEP:
        context.engines.actor.discard_policy()  # it holds this attempt's policy, not the committed one
    if not mine and stage.on_reuse is not None:
        stage.on_reuse(context, inputs, winner)
    return Built(stage.label(context), winner, stage_ref(path, winner), reused=not mine)


def manifest_path(manifest: StageManifest) -> str:
    """The path of a stage manifest, in the run that made it."""
    return paths.stage_manifest(manifest.run, manifest.iteration, manifest.stage, manifest.key)


def _written(stage: Stage, context: Context, output: Output, prefix: str) -> dict[str, TableRef]:
    if set(output.tables) != set(stage.writes):
        raise ValueError(f"stage {stage.name!r} declared {stage.writes} and wrote {tuple(output.tables)}")
    return {
        name: table if isinstance(table, TableRef) else write_table(context.store, prefix, name, table)
        for name, table in output.tables.items()
    }
