"""publish: writes the new weights to the store and makes every server generate with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import torch

from areal_tasks.engines.client import GenerateRequest
from areal_tasks.engines.handover import write_weights
from areal_tasks.engines.trainer.objective import agreement, agreement_totals, check_agreement, differences
from areal_tasks.stages.build import Built
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from areal_tasks.store.backend import Store
from areal_tasks.store.reachable import published_weights
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.manifest import FileRef, StageManifest, WeightsRef
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe
from schemas.tables import PUBLISH


def publish(recipe: RlhfRecipe | SftRecipe) -> Stage:
    """One row: path and size of the weights, seconds of writing and loading.

    The metrics include the agreement of servers and trainer where `train` has written what servers have to score.
    """
    return Stage(
        name="publish",
        kind=Kind.WEIGHTS,
        version=1,
        run=run,
        reads=columns("train_steps", "version"),
        writes=("publish",),
        carries=("policy",),
        after=("evaluate",),
        on_reuse=reload,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """The servers get the weights first if the trainer can send them; else they load them from the store."""
    train, servers, actor = inputs.manifests["train"], context.engines.servers, context.engines.actor
    started, ref = time.monotonic(), unwritten(train)
    row = publish_row(context.store, ref, (), servers.transport)
    direct = servers.transport != "store"
    loads = servers.serve(ref, actor.keeping(train)) if direct else []
    if servers.store_only or is_written(context.recipe, ref.version):
        done = write_weights(context.run, actor.keeping(train), ref.version)
        row = publish_row(context.store, done.ref, done.files, servers.transport)
        row["write_seconds"], loads = done.seconds, loads + servers.serve(done.ref, handed=direct)
    table = pa.Table.from_pylist([row | {"load_seconds": loads}], schema=PUBLISH)
    seconds = time.monotonic() - started
    return Output({"publish": table}, {"publish_seconds": seconds, **check_servers(context, train)})


def is_written(recipe: Recipe, version: int) -> bool:
    """Whether this version is written to the store: at the recipe's interval, at the run's end, or to be evaluated."""
    if isinstance(recipe, EvaluateRecipe):
        return True
    due = version % recipe.trainer.weights_every == 0 or version == recipe.schedule.iterations
    every = recipe.evaluation.every if isinstance(recipe, RlhfRecipe) else 0
    return due or (every > 0 and version % every == 0)


def published_late(store: Store, built: Iterable[Built], k: int) -> WeightsRef | None:
    """The weights that the publication of an iteration before `k` has written; None if there are none among `built`."""
    late = [one.manifest for one in built if one.manifest.stage == "publish" and one.manifest.iteration < k]
    refs = [published_weights(store, manifest) for manifest in late]
    return next((ref for ref in refs if ref.written), None)


def unwritten(train: StageManifest) -> WeightsRef:
    """The reference to weights that are not in the store; it has the digest of their train stage."""
    return WeightsRef(version=train.iteration + 1, attempt="", path="", sha256="", digest=train.digest)


def publish_row(store: Store, ref: WeightsRef, files: Sequence[FileRef], transport: str = "store") -> dict[str, object]:
    """A row of `PUBLISH`, without times; weights that are not in the store have no files."""
    return {
        "version": ref.version,
        "weights_attempt": ref.attempt,
        "transport": transport,
        "materialised": ref.written,
        "uri": store.uri(ref.path) if ref.written else "",
        "bytes": sum(f.bytes for f in files),
        "sha256": ref.digest,
        "write_seconds": 0.0,
        "load_seconds": [],
    }


def reload(context: Context, inputs: Inputs, manifest: StageManifest) -> None:
    """Give the servers the committed weights, from the store or from the trainer."""
    ref = published_weights(context.store, manifest)
    trainer = None if ref.written else context.engines.actor.keeping(inputs.manifests["train"])
    context.engines.servers.serve(ref, trainer)


# ── whether updated servers agree with the trainer ────────────────────────────────────────────────────────────────────


def check_servers(context: Context, train: StageManifest) -> dict[str, float]:
    """Have the servers, which hold the weights that `train` made, score the tokens of its table `scored`.

    Returns the metrics of their agreement with the trainer; none without such tokens, or without servers.

    Raises:
        Declined: they differ by more than `algorithm.max_logprob_gap`.
        UserError: a server does not give the log-probabilities of a prompt's tokens.
    """
    recipe, servers, ref = context.recipe, context.engines.servers, train.tables.get("scored")
    if ref is None or not ref.rows or not servers.count or not isinstance(recipe, RlhfRecipe):
        return {}
    table = read_table(context.store, ref)
    requests = [  # to score a row's tokens under its version, on any server
        GenerateRequest(row["input_ids"], 1, group=number, floor=row["version"], scored_from=row["scored_from"])
        for number, row in enumerate(table.to_pylist())
    ]
    client = servers.inference(waits=False)
    results = servers.call(client.generate(requests), generates=client)
    by_server = torch.tensor([score for result in results for score in result.prompt_logprobs])
    by_trainer = torch.tensor(pc.list_flatten(table["scores"]).to_pylist())
    if len(by_server) != len(by_trainer):
        asked = ", ".join(sorted({result.server for result in results}))
        raise UserError(f"the servers ({asked}) scored {len(by_server)} of {len(by_trainer)} tokens of prompts")
    found = agreement(*agreement_totals(differences(by_trainer, by_server)))
    said = f"The servers were to generate with version {requests[0].floor}."
    check_agreement(found, recipe.algorithm.max_logprob_gap, len(by_server), said)
    return found | {"compared": float(len(by_server))}
