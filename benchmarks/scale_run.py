"""Writes a made-up run through the store's own code: stages in parallel, commits in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pyarrow.parquet as pq

from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.opening import open_run
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run, load_run
from benchmarks.scale_rows import flat_rows, iteration_tables
from benchmarks.store import commit_stage
from schemas.manifest import IterationCommit, StageRef, WeightsRef
from schemas.recipe.load import load_recipe

T = TypeVar("T")
_BLOCK = 50


def write_run(url: str, name: str, iterations: int, samples: int, token_iterations: int, workers: int = 0) -> Run:
    """A run whose first `token_iterations` have tokens and texts. Without workers it is written in this process."""
    run = open_run(open_store(url), name, load_recipe("quickstart"))
    jobs = [
        (url, name, first, min(first + _BLOCK, iterations), samples, token_iterations)
        for first in range(0, iterations, _BLOCK)
    ]
    with mock.patch.object(os, "fsync", _nothing):
        for block in _everywhere(_write_block, jobs, workers):
            for k, stages in block:
                _commit(run, k, stages)
    return run


def _nothing(fd: int) -> None:
    """In place of fsync: a million of them would time the disk, not the queries."""


def _everywhere(work: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int) -> Iterator[T]:
    """`work` on every job, in order."""
    if not workers:
        yield from (work(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers) as pool:  # forked: without fsync, as this process is now
        yield from pool.map(work, *zip(*jobs, strict=True))


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
    run.commit_iteration(
        IterationCommit(
            run=run.name,
            iteration=k,
            attempt=new_attempt(),
            previous=run.digest_before(k),
            segment=0,
            stages=tuple(stages),
            weights=WeightsRef(version=k + 1, attempt="", path="", sha256="", digest=""),
            checkpoint=None,
            provenance=make_provenance(run.owner, now()),
        )
    )


def write_naive(folder: Path, iterations: int, samples: int, workers: int = 0) -> None:
    """The scalars of each iteration as one uncompressed Parquet file."""
    folder.mkdir()
    jobs = [(folder, first, min(first + _BLOCK, iterations), samples) for first in range(0, iterations, _BLOCK)]
    for _ in _everywhere(_write_naive, jobs, workers):
        pass


def _write_naive(folder: Path, first: int, stop: int, samples: int) -> None:
    for k in range(first, stop):
        pq.write_table(flat_rows(k, samples, with_tokens=False), folder / f"{k:06d}.parquet", compression="none")


def bytes_below(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(found.stat().st_size for found in folder.rglob("*") if found.is_file())
