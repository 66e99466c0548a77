"""scalars: the short columns of an iteration, joined by sample, which most queries read. Part of every commit."""

from __future__ import annotations

import math

import pyarrow as pa

from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe
from schemas.tables import ADVANTAGE, ROLLOUT, SCALARS, TRAIN_SAMPLES, VERIFY, scalar_fields

MISSING = {"minibatch": -1, "micro_batch": -1, "sample_logprob_gap": math.nan}
SOURCES = {"rollout": ROLLOUT, "verify": VERIFY, "advantage": ADVANTAGE, "train_samples": TRAIN_SAMPLES}


def scalars(recipe: RlhfRecipe) -> Stage:
    """One row per sample; samples that were not trained on have minibatch -1."""
    reads = tuple(
        c for name, schema in SOURCES.items() for c in columns(name, *(f.name for f in scalar_fields(schema)))
    )
    return Stage(name="scalars", kind=Kind.PURE, version=1, run=run, reads=reads, writes=("scalars",))


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Joins the short columns of the iteration's tables by `sample_id`."""
    rollout, *others = (inputs.read(context, name) for name in SOURCES)
    joined = {name: rollout[name] for name in rollout.column_names}
    for other in others:
        rows = aligned(rollout["sample_id"], other)
        joined |= {name: rows[name] for name in rows.column_names if name != "sample_id"}
    joined["iteration"] = pa.chunked_array([pa.array([context.iteration] * len(rollout), pa.int32())])
    return Output({"scalars": pa.table([joined[f.name].cast(f.type) for f in SCALARS], schema=SCALARS)})


def aligned(sample_ids: pa.ChunkedArray, table: pa.Table) -> pa.Table:
    """The rows of `table` in the order of `sample_ids`; zeros, minibatch -1 and gap NaN for missing samples."""
    if table["sample_id"].equals(sample_ids):
        return table
    wanted = pa.table({"sample_id": sample_ids, "_order": pa.array(range(len(sample_ids)))})
    joined = wanted.join(table, "sample_id", join_type="left outer").sort_by("_order").drop_columns(["_order"])
    filled = [
        column.fill_null(pa.scalar(MISSING.get(f.name, 0)).cast(f.type)) if column.null_count else column
        for f, column in zip(joined.schema, joined.columns, strict=True)
    ]
    return pa.table(filled, names=joined.column_names)
