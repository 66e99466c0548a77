"""Small tables, records and runs for the store's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, new_attempt
from areal_tasks.store.keys import combine_digests, digest_json
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run, stage_ref
from areal_tasks.store.shards import write_table
from schemas.manifest import IterationCommit, StageManifest, StageRef, WeightsRef
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import Recipe
from schemas.tables import TABLES

STAGES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "verify": ("verify",),
    "advantage": ("advantage",),
    "train": ("train_steps", "train_samples"),
    "scalars": ("scalars",),
}


def recipe(*overrides: str) -> Recipe:
    """The quickstart's recipe, changed by `a.b=value`."""
    return load_recipe("quickstart", overrides)


def table(name: str, rows: int = 16, tokens: int = 4, iteration: int = 0, seed: int = 0) -> pa.Table:
    """Any rows that satisfy the schema of `name`; sample ids are those of `iteration`."""
    rng = np.random.default_rng([seed, iteration])
    columns = [_column(field, rows, tokens, iteration, rng) for field in TABLES[name]]
    return pa.table(columns, schema=TABLES[name])


def _column(field: pa.Field, rows: int, tokens: int, iteration: int, rng: np.random.Generator) -> pa.Array:
    if field.name == "sample_id":
        return pa.array([f"{iteration * rows + i // 4}-{i % 4}" for i in range(rows)])
    if field.name == "iteration":
        return pa.array([iteration] * rows, pa.int32())
    if field.name == "num_tokens":
        return pa.array([tokens] * rows, pa.int32())
    if pa.types.is_list(field.type):
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * tokens)
        return pa.ListArray.from_arrays(offsets, _values(field.type.value_type, rows * tokens, rng), type=field.type)
    return _values(field.type, rows, rng)


def _values(kind: pa.DataType, n: int, rng: np.random.Generator) -> pa.Array:
    if pa.types.is_string(kind):
        return pa.array([f"text {value} é" for value in rng.integers(0, 9, n)])
    if pa.types.is_boolean(kind):
        return pa.array(rng.integers(0, 2, n).astype(bool))
    return pa.array(rng.integers(0, 1000, n)).cast(kind)


def manifest(
    store: Store, run: str, k: int, stage: str, tables: Mapping[str, pa.Table], key: str = ""
) -> StageManifest:
    """Tables written below a fresh attempt, and the manifest that would commit them."""
    attempt = new_attempt()
    prefix = paths.stage_attempt(run, k, stage, attempt)
    refs = {name: write_table(store, prefix, name, rows) for name, rows in tables.items()}
    return StageManifest(
        run=run,
        iteration=k,
        stage=stage,
        attempt=attempt,
        key=key or digest_json([run, k, stage])[:32],
        digest=combine_digests({name: ref.digest for name, ref in refs.items()}),
        inputs=(),
        tables=refs,
        metrics={"rows": float(sum(ref.rows for ref in refs.values()))},
        provenance=make_provenance(1, now()),
    )


def commit_stage(store: Store, made: StageManifest) -> StageRef:
    path = paths.stage_manifest(made.run, made.iteration, made.stage, made.key)
    there, _ = commit_once(store, path, made)
    return stage_ref(path, there)


def iteration_commit(run: Run, k: int, stages: Sequence[StageRef] = ()) -> IterationCommit:
    """A commit that follows the run's head."""
    return IterationCommit(
        run=run.name,
        iteration=k,
        attempt=new_attempt(),
        previous=run.digest_before(run.committed),
        segment=run.segment_at(k).n,
        stages=tuple(stages),
        weights=WeightsRef(version=k + 1, attempt="", path="", sha256="", digest="d"),  # not written
        checkpoint=None,
        provenance=make_provenance(run.owner, now()),
    )


def build(run: Run, iterations: Sequence[int], stages: Mapping[str, Sequence[str]] = STAGES) -> None:
    """Commit iterations with a small table for each of `stages`."""
    for k in iterations:
        refs = [
            commit_stage(run.store, manifest(run.store, run.name, k, stage, {n: table(n, iteration=k) for n in names}))
            for stage, names in stages.items()
        ]
        run.commit_iteration(iteration_commit(run, k, refs))
