"""How fast the store writes and scans, and how many bytes a token takes on disk.

    python -m benchmarks.store [--store URL] [--iterations 100] [--samples 4096]

Two loads: an iteration of the quickstart (small tables, where every millisecond is overhead) and rollouts of a real
size. The token ids are drawn from a Zipf law, prompts are shared by groups of eight, logprobs are noise: such rows
compress like real rollouts, and need no model.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import commit_once, new_attempt
from areal_tasks.store.keys import combine_digests, digest_json
from areal_tasks.store.opening import open_run
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, stage_ref
from areal_tasks.store.shards import content_digest, encode, read_table, write_table
from schemas.manifest import IterationCommit, StageManifest, StageRef, TableRef, WeightsRef
from schemas.recipe.load import load_recipe
from schemas.tables import ADVANTAGE, ROLLOUT, TABLES

SMALL = {"rollout": ("rollout",), "verify": ("verify",), "advantage": ("advantage",), "train": ("train_samples",)}
GROUP = 8
VOCABULARY = 50_000
WORDS = 2_000


def table(name: str, rows: int, tokens: int, iteration: int = 0) -> pa.Table:
    """Rows of the table `name`, `tokens` tokens each, half of them the group's prompt."""
    rng = np.random.default_rng(iteration)
    return pa.table([_column(f, rows, tokens, iteration, rng) for f in TABLES[name]], schema=TABLES[name])


def _column(field: pa.Field, rows: int, tokens: int, iteration: int, rng: np.random.Generator) -> pa.Array:
    if field.name == "sample_id":
        return pa.array([f"{(iteration * rows + i) // GROUP}-{i % GROUP}" for i in range(rows)])
    if field.name in ("num_tokens", "iteration"):
        return pa.array([tokens if field.name == "num_tokens" else iteration] * rows, pa.int32())
    if pa.types.is_list(field.type):
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * tokens)
        return pa.ListArray.from_arrays(offsets, pa.array(_per_token(field, rows, tokens, rng)), type=field.type)
    if pa.types.is_string(field.type):
        return pa.array(_texts(field.name, rows, tokens, rng))
    return pa.array(rng.integers(0, 9, rows)).cast(field.type)


def _per_token(field: pa.Field, rows: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    generated = np.arange(tokens) >= tokens // 2
    if pa.types.is_boolean(field.type.value_type):
        return np.tile(generated & (field.name == "loss_mask"), rows)  # no token is `stale_kv`
    if field.name == "versions":
        return np.tile(np.where(generated, 7, -1), rows).astype(np.int32)
    if pa.types.is_floating(field.type.value_type):
        return np.where(np.tile(generated, rows), -rng.exponential(size=rows * tokens), 0).astype(np.float32)
    ids = (rng.zipf(1.2, (rows, tokens)) % VOCABULARY).astype(np.int32)
    ids[:, ~generated] = np.repeat(ids[::GROUP], GROUP, axis=0)[:rows, ~generated]
    return ids.ravel()


def _texts(name: str, rows: int, tokens: int, rng: np.random.Generator) -> list[str]:
    if name not in ("prompt", "completion"):
        return ["correct"] * rows
    words = rng.zipf(1.3, (rows, max(1, tokens // 2))) % WORDS
    if name == "prompt":
        words = np.repeat(words[::GROUP], GROUP, axis=0)[:rows]
    return [" ".join(f"w{word}" for word in row) for row in words]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work`, after one run to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def write(store: Store, run: str, name: str, rows: pa.Table) -> TableRef:
    return write_table(store, paths.stage_attempt(run, 0, name, new_attempt()), name, rows)


def commit_stage(run: Run, k: int, stage: str, tables: dict[str, pa.Table]) -> StageRef:
    attempt = new_attempt()
    prefix = paths.stage_attempt(run.name, k, stage, attempt)
    refs = {name: write_table(run.store, prefix, name, rows) for name, rows in tables.items()}
    manifest = StageManifest(
        run=run.name,
        iteration=k,
        stage=stage,
        attempt=attempt,
        key=digest_json([stage, k])[:32],
        digest=combine_digests({name: ref.digest for name, ref in refs.items()}),
        inputs=(),
        tables=refs,
        provenance=make_provenance(run.owner, now()),
    )
    path = paths.stage_manifest(run.name, k, stage, manifest.key)
    return stage_ref(path, commit_once(run.store, path, manifest)[0])


def commit_iterations(run: Run, count: int, rows: int, tokens: int) -> float:
    """Commit small iterations as the quickstart does; milliseconds per iteration. Making the rows does not count."""
    spent = 0.0
    for k in range(count):
        stages = SMALL | {"scalars": ("scalars",)}
        made = {stage: {n: table(n, rows, tokens, k) for n in names} for stage, names in stages.items()}
        started = time.perf_counter()
        refs = tuple(commit_stage(run, k, stage, tables) for stage, tables in made.items())
        commit = IterationCommit(
            run=run.name,
            iteration=k,
            attempt=new_attempt(),
            previous=run.digest_before(k),
            segment=0,
            stages=refs,
            weights=WeightsRef(version=k + 1, attempt="", path="", sha256="", digest=""),
            checkpoint=None,
            provenance=make_provenance(run.owner, now()),
        )
        run.commit_iteration(commit)
        spent += time.perf_counter() - started
    return spent / count * 1e3


def small(store: Store, iterations: int) -> list[tuple[str, str]]:
    """Iterations of the quickstart: 256 samples of 16 tokens."""
    rows = table("rollout", 256, 16)
    ref = write(store, "small", "rollout", rows)
    run = open_run(store, "bench", load_recipe("quickstart"))
    iteration = commit_iterations(run, iterations, 256, 16)
    queries = {
        f"SQL, mean reward of each of {iterations} iterations": "SELECT iteration, avg(reward) FROM scalars GROUP BY 1",
        f"SQL, the five best of {256 * iterations:,} samples with texts": (
            "SELECT prompt, completion, reward FROM samples ORDER BY reward DESC LIMIT 5"
        ),
    }
    return [
        ("encode (Parquet)", f"{seconds(lambda: encode(rows), 50) * 1e3:.2f} ms"),
        ("content digest", f"{seconds(lambda: content_digest(rows), 50) * 1e3:.2f} ms"),
        ("write_table, all included", f"{seconds(lambda: write(store, 'small', 'rollout', rows), 50) * 1e3:.2f} ms"),
        ("read_table, verified", f"{seconds(lambda: read_table(store, ref), 50) * 1e3:.2f} ms"),
        ("an iteration: 5 tables, 5 manifests, 1 commit", f"{iteration:.1f} ms"),
        *(
            (name, f"{seconds(lambda q=query: run_sql(store, 'bench', q), 3) * 1e3:.0f} ms")
            for name, query in queries.items()
        ),
    ]


def large(store: Store, rows: int) -> list[tuple[str, str]]:
    """Rollouts of a real size: samples of 1024 tokens."""
    rollout, advantage = table("rollout", rows, 1024), table("advantage", rows, 1024)
    ref, more = write(store, "large", "rollout", rollout), write(store, "large", "advantage", advantage)
    stored = sum(shard.bytes for shard in ref.shards)
    write_time = seconds(lambda: write(store, "large", "rollout", rollout), 3)
    read_time = seconds(lambda: read_table(store, ref), 3)
    column_time = seconds(lambda: read_table(store, ref, ("num_tokens", "sample_id")), 3)
    memory, added = rollout.nbytes, sum(shard.bytes for shard in more.shards) / ref.tokens
    per_float = added / sum(pa.types.is_list(f.type) for f in ADVANTAGE)
    floats = [f.name for f in ROLLOUT if pa.types.is_list(f.type) and pa.types.is_floating(f.type.value_type)]
    return [
        ("write", f"{memory / write_time / 1e6:.0f} MB/s of memory ({stored / write_time / 1e6:.0f} MB/s stored)"),
        ("scan, all columns, verified", f"{memory / read_time / 1e6:.0f} MB/s ({stored / read_time / 1e6:.0f} stored)"),
        ("scan, two short columns, verified", f"{column_time * 1e3:.0f} ms"),
        ("content digest", f"{memory / seconds(lambda: content_digest(rollout), 3) / 1e6:.0f} MB/s"),
        ("rollout on disk", f"{stored / ref.tokens:.2f} bytes per token (with {', '.join(floats)})"),
        ("a further float column on disk", f"{per_float:.2f} bytes per token (half of them prompt)"),
    ]


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<48} {value}")


def machine() -> str:
    """The machine in a line."""
    cores, python = os.cpu_count(), platform.python_version()
    return f"{platform.machine()}, {cores} cores, {platform.system()}, Python {python}, pyarrow {pa.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--store", default="", help="a fresh folder's or bucket's URL; default: a temporary folder here"
    )
    parser.add_argument("--iterations", type=int, default=100, help="small ones")
    parser.add_argument("--samples", type=int, default=4096, help="large ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        store = open_store(options.store or Path(folder).as_uri())
        print(f"{machine()}; load {os.getloadavg()[0]:.1f}; store {store.url.split('://')[0]}://")
        print_table("256 samples of 16 tokens", small(store, options.iterations))
        print_table(f"{options.samples} samples of 1024 tokens", large(store, options.samples))


if __name__ == "__main__":
    main()
