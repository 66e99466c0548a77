"""Writes a made-up run through the store's own code: stages in parallel, commits in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run, load_run, open_run
from benchmarks.scale_rows import flat_rows, iteration_tables
from benchmarks.store import commit_stage
from schemas.manifest import IterationCommit, StageRef, WeightsRef
from schemas.recipe.load import load_recipe

_BLOCK = 50


def write_run(url: str, name: str, iterations: int, samples: int, token_iterations: int, workers: int) -> Run:
    """A run of `iterations`, of which the first `token_iterations` have tokens and texts."""
    _spare_the_disk()
    run = open_run(open_store(url), name, "rlhf", load_recipe("quickstart"))
    jobs = [
        (url, name, first, min(first + _BLOCK, iterations), samples, token_iterations)
        for first in range(0, iterations, _BLOCK)
    ]
    with ProcessPoolExecutor(workers, initializer=_spare_the_disk) as pool:
        for block in pool.map(_write_block, *zip(*jobs, strict=True)):
            for k, stages in block:
                _commit(run, k, stages)
    return run


def _spare_the_disk() -> None:
    """A million fsyncs would time the disk, not the queries."""
    os.fsync = lambda fd: None


def _write_block(
    url: str, name: str, first: int, stop: int, samples: int, token_iterations: int
) -> list[tuple[int, list[StageRef]]]:
    run = load_run(open_store(url), name)
    return [
        (
            k,
            [
                commit_stage(run, k, stage, tables)
                for stage, tables in iteration_tables(k, samples, k < token_iterations).items()
            ],
        )
        for k in range(first, stop)
    ]


def _commit(run: Run, k: int, stages: list[StageRef]) -> None:
    before = run.commit(k - 1) if k else None
    run.commit_iteration(
        IterationCommit(
            run=run.name,
            iteration=k,
            attempt=new_attempt(),
            previous=run.digest_of(before),
            segment=0,
            stages=tuple(stages),
            weights=WeightsRef(version=k + 1, attempt="", path="", sha256="", digest=""),
            checkpoint=None,
            provenance=make_provenance(run.owner, now()),
        )
    )


def write_naive(folder: Path, iterations: int, samples: int, token_iterations: int, workers: int) -> None:
    """One uncompressed Parquet file for each iteration, with everything there is of its samples."""
    folder.mkdir()
    jobs = [(folder, k, samples, k < token_iterations) for k in range(iterations)]
    with ProcessPoolExecutor(workers) as pool:
        for _ in pool.map(_write_naive, *zip(*jobs, strict=True), chunksize=_BLOCK):
            pass


def _write_naive(folder: Path, k: int, samples: int, with_tokens: bool) -> None:
    pq.write_table(flat_rows(k, samples, with_tokens), folder / f"rollout-{k:06d}.parquet", compression="none")


def sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file below `folder`, by path, with its size."""
    for found in folder.rglob("*"):
        if found.is_file():
            yield str(found.relative_to(folder)), found.stat().st_size
