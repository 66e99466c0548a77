"""What a rank reads of an iteration's tables: of all samples what the plan depends on, and the tokens of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from jaxtyping import Int
from torch import Tensor

from areal_tasks.data.batching import spans
from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.learner import (
    Plan,
    Rows,
    make_plan,
    passes_of,
    passes_of_rank,
    recorded_plan,
    rows_of_rank,
    samples_of,
)
from areal_tasks.engines.trainer.rows import (
    COLUMNS,
    PLANNING,
    TEXT,
    Batch,
    Samples,
    grpo_batch,
    grpo_samples,
    read_of,
    scored_samples,
    sft_batch,
    sft_samples,
    text_batch,
)
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.store.shards import read_files

#: Of tables, by name: verified files on this disk.
Files = Mapping[str, Sequence[Path]]


def plan_and_batch(command: Train, settings: Settings, files: Files, rank: int, world: int) -> tuple[Plan, Batch]:
    """The plan of all ranks, and the batch with the tokens of the samples of this one.

    Raises:
        UserError: tables do not fit each other, or a token is newer than the policy or too old.
    """
    samples = _samples(command, files)
    plan = _plan(command, settings, files, samples, world)
    ids, lag = _ids(samples, rows_of_rank(plan, rank, world)), settings.max_lag
    tables = {name: read_files(name, files[name], read_of(name, ages=lag is not None), ids) for name in command.tables}
    if command.kind == "sft":
        return plan, sft_batch(tables["batch"], samples)
    return plan, grpo_batch(tables, command.version, lag, samples)


def passes_and_batch(files: Files, settings: Settings, rank: int, world: int) -> tuple[list[Rows], Batch]:
    """The passes of all ranks that score a rollout, and the batch with the tokens of the samples of this one.

    Raises:
        UserError: the lists of a row differ in length.
    """
    samples = scored_samples(read_files("rollout", files["rollout"], PLANNING["rollout"]))
    passes = passes_of(make_plan(samples, replace(settings, minibatches=1), 0, world), 0)
    ids = _ids(samples, samples_of(passes_of_rank(passes, rank, world)))
    return passes, text_batch(read_files("rollout", files["rollout"], TEXT, ids), samples)


def places_of_rank(passes: list[Rows], lengths: Int[Tensor, " B"], world: int, rank: int) -> Int[Tensor, " n"]:
    """Where the tokens of a rank's samples, in the order of its batch, are among those of all samples."""
    rows = samples_of(passes_of_rank(passes, rank, world))
    return spans((lengths.cumsum(0) - lengths)[rows], lengths[rows])


def _ids(samples: Samples, rows: Rows) -> pa.Array:
    return samples.ids.take(pa.array(rows.numpy()))


def _samples(command: Train, files: Files) -> Samples:
    planning = [name for name in command.tables if name in PLANNING]
    tables = {name: read_files(name, files[name], PLANNING[name]) for name in planning}
    return sft_samples(tables["batch"]) if command.kind == "sft" else grpo_samples(tables, command.version)


def _plan(command: Train, settings: Settings, files: Files, samples: Samples, world: int) -> Plan:
    """The recorded plan, if the command names one."""
    if command.plan is None:
        return make_plan(samples, settings, command.iteration, world)
    return recorded_plan(samples, read_files("train_samples", files["train_samples"], COLUMNS["train_samples"]))
