"""Runs made of chosen rows, without engines: what a report shows of them is known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import commit_once, new_attempt
from areal_tasks.store.keys import combine_digests, digest_json
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.opening import open_run
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run, stage_ref
from areal_tasks.store.shards import write_table
from schemas.manifest import IterationCommit, StageManifest, StageRef, WeightsRef
from schemas.recipe.load import load_recipe
from schemas.tables import TABLES

Row = dict[str, Any]

WORDS = ("<eos>", "<script>alert(1)</script>", "hello", " world", "\n", "\u202e", "😀", "<img src=x onerror=hacked=1>")
GROUP = 4

_ZERO = {pa.string(): "", pa.bool_(): False}


def store_of(folder: Path) -> Store:
    return open_store((folder / "store").as_uri())


def full(table: str, row: Mapping[str, Any]) -> Row:
    """A row of `table`: what is given, and nothing-saying values for the rest."""
    return {field.name: row.get(field.name, _nothing(field.type)) for field in TABLES[table]}


def _nothing(kind: pa.DataType) -> Any:
    return [] if pa.types.is_list(kind) else _ZERO.get(kind, 0)


def sample(iteration: int, index: int, **changes: Any) -> Row:
    """A sample with all that its iteration's tables say of it: two prompt tokens, three of its own."""
    group = iteration * 100 + index // GROUP
    row: Row = {
        "iteration": iteration,
        "sample_id": f"{group}-{index % GROUP}",
        "group_id": group,
        "sample_index": index % GROUP,
        "prompt_id": index // GROUP,
        "prompt": f"prompt {index // GROUP}",
        "completion": f"completion {iteration} {index}",
        "answer": "42",
        "input_ids": [2, 3, 2, 3, 0],
        "loss_mask": [False, False, True, True, True],
        "logprobs": [0.0, 0.0, -0.5, -3.25, -0.125],
        "versions": [-1, -1, iteration, iteration, iteration],
        "stale_kv": [False] * 5,
        "advantages": [0.0, 0.0, 1.5, 1.5, 1.5],
        "returns": [0.0] * 5,
        "num_tokens": 5,
        "num_generated": 3,
        "stop_reason": "stop",
        "version_min": iteration,
        "version_max": iteration,
        "reward": float(index % 2),
        "verdict": "correct" if index % 2 else "incorrect",
        "kept": True,
        "shaped_reward": 0.5,
    }
    return row | changes


def rows(iteration: int, count: int = 8, **changes: Any) -> list[Row]:
    """The samples of an iteration."""
    return [sample(iteration, i, **changes) for i in range(count)]


def steps(iteration: int, count: int = 2) -> list[Row]:
    """Optimizer steps whose gradient norms are 1, 2, … and whose loss falls."""
    return [
        {
            "version": iteration + 1,
            "step": iteration * count + i + 1,
            "minibatch": i,
            "loss": 1.0 / (iteration + 1),
            "entropy": 0.5,
            "kl": 0.01,
            "approx_kl": 0.02,
            "clip_fraction": 0.25,
            "grad_norm": float(i + 1),
            "lr": 1e-3,
            "logprob_gap_mean": 1e-6 if i == 0 else float("nan"),
            "logprob_gap_max": 1e-5 if i == 0 else float("nan"),
            "ratio_outside": 0.0 if i == 0 else float("nan"),
            "tokens": 50,
            "total_tokens": 100,
        }
        for i in range(count)
    ]


def make_run(
    store: Store,
    name: str,
    iterations: Sequence[Sequence[Row]],
    *overrides: str,
    tokenizer: bool = True,
    evaluate: bool = True,
    trains: bool = True,
    measured: Mapping[str, float] | None = None,
) -> Run:
    """A run of the flow rlhf whose iterations hold these samples.

    `evaluate`: version 0 is evaluated on them too. Without `trains` it ends before training, as a replay may.
    `measured`: the metrics of the stages `train`.
    """
    recipe = load_recipe("quickstart", [*overrides, f"schedule.iterations={max(len(iterations), 3)}"])
    run = open_run(store, name, recipe)
    for k, rows in enumerate(iterations):
        trained = ("rollout", "verify", "advantage", "train_samples", "scalars")
        tables = {table: (table if table != "train_samples" else "train", rows) for table in trained}
        stages = {"train": {"train_steps": steps(k), "train_samples": rows}}
        stages |= {stage: {table: found} for table, (stage, found) in tables.items() if stage != "train"}
        if not trains:
            del stages["train"], stages["scalars"]
        if k == 0 and evaluate:
            stages["evaluate"] = {"evaluate": [row | {"weights_version": 0} for row in rows]}
        if k == 0 and tokenizer:
            stages["initialise"] = {"initial_weights": [_initial_weights(store, name)]}
        metrics = {"train": measured or {}}
        _commit(run, k, [_stage(run, k, stage, found, metrics.get(stage, {})) for stage, found in stages.items()])
    return run


def _initial_weights(store: Store, run: str) -> Row:
    """The row of a publication of weights that are a tokenizer alone."""
    attempt = new_attempt()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "model.safetensors").write_bytes(b"large, and not read")
        files = upload(store, paths.weights_attempt(run, 0, attempt), Path(folder))
    commit_weights(store, run, 0, attempt, "weights", files, make_provenance(1, now()))
    return {"version": 0, "weights_attempt": attempt, "materialised": True}


def _stage(run: Run, k: int, stage: str, tables: Mapping[str, Sequence[Row]], metrics: Mapping[str, float]) -> StageRef:
    attempt = new_attempt()
    prefix = paths.stage_attempt(run.name, k, stage, attempt)
    arrow = {n: pa.Table.from_pylist([full(n, row) for row in rows], schema=TABLES[n]) for n, rows in tables.items()}
    refs = {name: write_table(run.store, prefix, name, table) for name, table in arrow.items()}
    made = StageManifest(
        run=run.name,
        iteration=k,
        stage=stage,
        attempt=attempt,
        key=digest_json([run.name, k, stage])[:32],
        digest=combine_digests({name: ref.digest for name, ref in refs.items()}),
        inputs=(),
        tables=refs,
        metrics=dict(metrics),
        provenance=make_provenance(1, now()),
    )
    path = paths.stage_manifest(run.name, k, stage, made.key)
    commit_once(run.store, path, made)
    return stage_ref(path, made)


def _commit(run: Run, k: int, stages: Sequence[StageRef]) -> None:
    """Iteration `k`, whose weights were handed over and not written."""
    run.commit_iteration(
        IterationCommit(
            run=run.name,
            iteration=k,
            attempt=new_attempt(),
            previous=run.digest_before(run.committed),
            segment=0,
            stages=tuple(stages),
            weights=WeightsRef(version=k + 1, attempt="", path="", sha256="", digest="d"),
            checkpoint=None,
            provenance=make_provenance(run.owner, now()),
        )
    )
