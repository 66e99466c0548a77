"""What a rank reads of an iteration's tables: of all samples what the plan depends on, and the tokens of its own."""

from __future__ import annotations

from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.plan import Plan, make_plan, rank_of_samples, recorded_plan, scoring_plan
from areal_tasks.engines.trainer.rows import (
    COLUMNS,
    PLANNING,
    TEXT,
    Batch,
    grpo_batch,
    grpo_samples,
    read_of,
    text_batch,
    text_samples,
)
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.engines.trainer.tables import SharedTables


def plan_and_batch(command: Train, settings: Settings, tables: SharedTables) -> tuple[Plan, Batch]:
    """The plan of all ranks, recorded if the command names one, and the batch with the tokens of this one's samples.

    UserError: tables do not fit each other, or a token is newer than the policy or too old.
    """
    world, lag, is_sft = tables.group.world, settings.max_lag, command.kind == "sft"
    read = tables.read({name: PLANNING[name] for name in command.tables if name in PLANNING})
    samples = text_samples(read["batch"]) if is_sft else grpo_samples(read, command.version)
    if command.plan is None:
        plan = make_plan(samples, settings, command.iteration, world)
    else:
        plan = recorded_plan(samples, tables.read({"train_samples": COLUMNS["train_samples"]})["train_samples"])
    columns = {name: read_of(name, ages=lag is not None) for name in command.tables}
    mine = tables.read(columns, samples.ids, rank_of_samples(plan, world))
    if is_sft:
        return plan, tables.group.together(lambda: text_batch(mine["batch"], samples))
    return plan, tables.group.together(lambda: grpo_batch(mine, command.version, lag, samples))


def plan_and_texts(tables: SharedTables, settings: Settings) -> tuple[Plan, Batch]:
    """The plan by which all ranks score a rollout, and the batch with the tokens of the samples of this one.

    UserError: the lists of a row differ in length.
    """
    world = tables.group.world
    samples = text_samples(tables.read({"rollout": PLANNING["rollout"]})["rollout"])
    plan = scoring_plan(samples.lengths, settings.trainer, world)
    mine = tables.read({"rollout": TEXT}, samples.ids, rank_of_samples(plan, world))
    return plan, tables.group.together(lambda: text_batch(mine["rollout"], samples))
