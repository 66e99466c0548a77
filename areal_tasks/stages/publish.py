"""publish: writes the new weights to the store and makes every server generate with them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from areal_tasks.engines.trainer.commands import Write
from areal_tasks.stages.context import Context
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.files import commit_weights, weights_ref
from areal_tasks.store.paths import weights, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.shards import read_table
from schemas.manifest import FileRef, StageManifest, TableRef, WeightsRef
from schemas.recipe.recipe import RlhfRecipe, SftRecipe
from schemas.tables import PUBLISH


def publish(recipe: RlhfRecipe | SftRecipe) -> Stage:
    """One row: where the weights lie, how large they are, how long writing and loading took."""
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
    version = context.iteration + 1
    started = time.monotonic()
    ref, files = write_weights(context, inputs.manifests["train"], version)
    written = time.monotonic() - started
    loads = context.engines.serve_weights(ref)
    row = publish_row(context.store, ref, files) | {"write_seconds": written, "load_seconds": loads}
    return Output({"publish": pa.Table.from_pylist([row], schema=PUBLISH)}, {"write_seconds": written})


def publish_row(store: Store, ref: WeightsRef, files: Sequence[FileRef]) -> dict[str, object]:
    """A row of `PUBLISH` for weights that nobody has timed."""
    return {
        "version": ref.version,
        "weights_attempt": ref.attempt,
        "transport": "store",
        "materialised": True,
        "uri": store.uri(ref.path),
        "bytes": sum(f.bytes for f in files),
        "sha256": ref.digest,
        "write_seconds": 0.0,
        "load_seconds": [],
    }


def write_weights(context: Context, train: StageManifest, version: int) -> tuple[WeightsRef, tuple[FileRef, ...]]:
    """Have the trainer write the weights it holds under a fresh attempt, and commit them."""
    attempt, started, run = new_attempt(), now(), context.run
    command = Write(owner=run.owner, version=version, prefix=weights_attempt(run.name, version, attempt))
    files = context.engines.trainer_after(train).publish(command).files
    provenance = make_provenance(run.owner, started)
    return commit_weights(context.store, run.name, version, attempt, "weights", files, provenance), files


def reload(context: Context, inputs: Inputs, manifest: StageManifest) -> None:
    """The weights are committed: let the servers have them."""
    ref = published_weights(context.store, context.run.name, manifest.tables["publish"])
    context.engines.serve_weights(ref)


def published_weights(store: Store, run: str, table: TableRef) -> WeightsRef:
    """The weights that the one row of a publish table names."""
    row = read_table(store, table, ("version", "weights_attempt")).to_pylist()[0]
    return weights_ref(store, weights(run, row["version"], row["weights_attempt"]))
