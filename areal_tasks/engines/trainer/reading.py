"""What a rank reads of an iteration's tables: of all samples what the plan depends on, and the tokens of its own."""

from __future__ import annotations

from dataclasses import replace

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
    rank_of_samples,
    recorded_plan,
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
from areal_tasks.engines.trainer.tables import SharedTables


def plan_and_batch(command: Train, settings: Settings, tables: SharedTables) -> tuple[Plan, Batch]:
    """The plan of all ranks, and the batch with the tokens of the samples of this one.

    Raises:
        UserError: tables do not fit each other, or a token is newer than the policy or too old.
    """
    samples, lag = _samples(command, tables), settings.max_lag
    plan = _plan(command, settings, tables, samples)
    columns = {name: read_of(name, ages=lag is not None) for name in command.tables}
    mine = tables.read(columns, samples.ids, rank_of_samples(plan, tables.group.world))
    if command.kind == "sft":
        return plan, tables.group.together(lambda: sft_batch(mine["batch"], samples))
    return plan, tables.group.together(lambda: grpo_batch(mine, command.version, lag, samples))


def passes_and_batch(tables: SharedTables, settings: Settings) -> tuple[list[Rows], Batch]:
    """The passes of all ranks that score a rollout, and the batch with the tokens of the samples of this one.

    Raises:
        UserError: the lists of a row differ in length.
    """
    world = tables.group.world
    samples = scored_samples(tables.read({"rollout": PLANNING["rollout"]})["rollout"])
    plan = make_plan(samples, replace(settings, minibatches=1), 0, world)
    mine = tables.read({"rollout": TEXT}, samples.ids, rank_of_samples(plan, world))
    return passes_of(plan, 0), tables.group.together(lambda: text_batch(mine["rollout"], samples))


def places_of_rank(passes: list[Rows], lengths: Int[Tensor, " B"], world: int, rank: int) -> Int[Tensor, " n"]:
    """Where the tokens of a rank's samples, in the order of its batch, are among those of all samples."""
    rows = samples_of(passes_of_rank(passes, rank, world))
    return spans((lengths.cumsum(0) - lengths)[rows], lengths[rows])


def _samples(command: Train, tables: SharedTables) -> Samples:
    read = tables.read({name: PLANNING[name] for name in command.tables if name in PLANNING})
    return sft_samples(read["batch"]) if command.kind == "sft" else grpo_samples(read, command.version)


def _plan(command: Train, settings: Settings, tables: SharedTables, samples: Samples) -> Plan:
    """The recorded plan, if the command names one."""
    if command.plan is None:
        return make_plan(samples, settings, command.iteration, tables.group.world)
    name = "train_samples"
    return recorded_plan(samples, tables.read({name: COLUMNS[name]})[name])
