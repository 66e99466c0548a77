"""The plan of an iteration: the optimizer step, the pass and the rank of each sample, known to every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from areal_tasks.data.batching import LEFT_OUT, micro_batches, minibatches
from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.rows import (
    COLUMNS,
    PLANNING,
    TEXT,
    Batch,
    Samples,
    aligned,
    grpo_batch,
    grpo_samples,
    read_of,
    text_batch,
    text_samples,
)
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.engines.trainer.tables import SharedTables
from schemas.recipe.training import Trainer

Rows = Int[Tensor, " _"]  # indices of samples in the batch


@dataclass(frozen=True)
class Plan:
    """The minibatch and micro-batch of each sample; `LEFT_OUT` for those that are not trained on.

    A minibatch has micro-batches 0, 1, …, which are its passes, and the ranks take them in turn.
    """

    minibatch: Int[Tensor, " B"]
    micro_batch: Int[Tensor, " B"]


def make_plan(samples: Samples, settings: Settings, iteration: int, world: int = 1) -> Plan:
    """Divide the kept samples into minibatches, and each of these into micro-batches within the token budget.

    The number of micro-batches is a multiple of `world`, the number of ranks, if there are enough samples.
    """
    assigned = samples.minibatch
    if assigned is None:
        assigned = minibatches(samples.kept, settings.minibatches, settings.seed, iteration)
    micro = torch.full_like(assigned, LEFT_OUT)
    for number in range(settings.minibatches):
        rows = torch.nonzero(assigned == number)[:, 0]
        micro[rows] = _micro_batches(samples.lengths[rows], settings.trainer, world)
    return Plan(assigned, micro)


def scoring_plan(lengths: Int[Tensor, " B"], trainer: Trainer, world: int) -> Plan:
    """The plan to score samples of these lengths: as one minibatch."""
    return Plan(torch.zeros_like(lengths), _micro_batches(lengths, trainer, world))


def passes_of(plan: Plan, number: int) -> int:
    """The passes over minibatch `number`, on all ranks together."""
    micro = plan.micro_batch[plan.minibatch == number]
    return int(micro.max()) + 1 if len(micro) else 0


def passes_of_rank(plan: Plan, number: int, rank: int, world: int) -> list[Rows]:
    """The samples of a rank's passes over minibatch `number`; one may be empty: all ranks need equally many."""
    rows = torch.nonzero((plan.minibatch == number) & (plan.micro_batch % world == rank))[:, 0]
    turns, order = (plan.micro_batch[rows] // world).sort(stable=True)
    sizes = torch.bincount(turns, minlength=-(-passes_of(plan, number) // world))
    return list(torch.split(rows[order], sizes.tolist()))


def rank_of_samples(plan: Plan, world: int) -> Int[Tensor, " B"]:
    """The rank that reads each sample: the one that trains on it; those left out, which are checked too, in turn."""
    left_out = plan.minibatch == LEFT_OUT
    return torch.where(left_out, left_out.cumsum(0) - 1, plan.micro_batch) % world


def _micro_batches(lengths: Int[Tensor, " n"], trainer: Trainer, world: int) -> Int[Tensor, " n"]:
    return micro_batches(lengths, trainer.micro_batch_tokens, trainer.layout, world)


# ── what a rank reads: of all samples what the plan depends on, and the tokens of its own ───────────────────────────


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
        recorded = tables.read({"train_samples": COLUMNS["train_samples"]})["train_samples"]
        recorded = aligned(recorded, samples.ids, "train_samples")
        plan = Plan(*(torch.tensor(recorded[name].to_numpy()).long() for name in ("minibatch", "micro_batch")))
    columns = {name: read_of(name, ages=lag is not None) for name in command.tables}
    mine = tables.read(columns, samples.ids, rank_of_samples(plan, world))
    if is_sft:
        return plan, tables.group.together(lambda: text_batch(mine["batch"], samples))
    return plan, tables.group.together(lambda: grpo_batch(mine, command.version, lag, samples))


def plan_and_texts(tables: SharedTables, settings: Settings) -> tuple[Plan, Batch]:
    """The plan by which all ranks score a rollout, and this one's samples. UserError: lists differ in length."""
    world = tables.group.world
    samples = text_samples(tables.read({"rollout": PLANNING["rollout"]})["rollout"])
    plan = scoring_plan(samples.lengths, settings.trainer, world)
    mine = tables.read({"rollout": TEXT}, samples.ids, rank_of_samples(plan, world))
    return plan, tables.group.together(lambda: text_batch(mine["rollout"], samples))
