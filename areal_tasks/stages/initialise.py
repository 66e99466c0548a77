"""initialise: puts the initial weights (version 0) and the tokenizer into the store, once per run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa

from areal_tasks.engines.models import initial_weights
from areal_tasks.stages.publish import publish_row
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.recipe.recipe import Recipe
from schemas.tables import PUBLISH


def initialise(recipe: Recipe) -> Stage:
    """One row: the weights that every engine starts from. The weights of another run are referenced, not copied."""
    return Stage(
        name="initialise",
        kind=Kind.WEIGHTS,
        version=1,
        run=run,
        writes=("initial_weights",),
        fields=("model.path", "model.scratch", "model.max_length"),
        once=True,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Writes the initial weights, or references those of another run, and commits them as version 0."""
    name, attempt, started = context.run.name, new_attempt(), now()
    into = weights_attempt(name, 0, attempt)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = context.recipe
        files = initial_weights(context.store, recipe.model, recipe.seed, into, Path(scratch), name)
    provenance = make_provenance(context.run.owner, started)
    ref = commit_weights(context.store, name, 0, attempt, "weights", files, provenance)
    row = publish_row(context.store, ref, files)
    return Output({"initial_weights": pa.Table.from_pylist([row], schema=PUBLISH)})
