"""Each rank holds the tokens of its own samples only, to train or to score; all read what the plan depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from trainer_builders import World, advantage, rlhf_recipe, rollout, with_column

from areal_tasks.data.batching import LEFT_OUT, micro_batches
from areal_tasks.engines.trainer import reading
from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.learner import Plan
from areal_tasks.engines.trainer.reading import passes_and_batch, places_of_rank, plan_and_batch
from areal_tasks.engines.trainer.rows import PLANNING, Batch
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.store.shards import read_files
from schemas.errors import UserError

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]
DROPPED = (9, 10, 11)
Read = tuple[str, tuple[str, ...], pa.Table]


@pytest.fixture
def rlhf(world: World) -> World:
    world.recipe = rlhf_recipe()
    return world


def planned(trainer: Trainer, command: Train, rank: int, world: int) -> tuple[Plan, Batch]:
    """What this rank among so many plans and reads."""
    return plan_and_batch(
        command, trainer.settings, trainer.tables.files(trainer.store, command.tables, False), rank, world
    )


def grpo(world: World, table: pa.Table) -> Train:
    return world.train_command(0, {"rollout": table, "advantage": advantage(table, dropped=DROPPED)})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What is read from now on."""
    found: list[Read] = []

    def recorded(name: str, files: Sequence[Path], columns: Sequence[str], ids: pa.Array | None = None) -> pa.Table:
        found.append((name, tuple(columns), read_files(name, files, columns, ids)))
        return found[-1][2]

    monkeypatch.setattr(reading, "read_files", recorded)
    return found


def rows_of_tokens(reads: list[Read]) -> list[int]:
    """Of how many samples more was read than what the plan depends on."""
    return [table.num_rows for name, columns, table in reads if columns != PLANNING[name]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_tokens_of_its_own_samples_only(rlhf: World, reads: list[Read], ranks: int) -> None:
    trainer, command, rows, plans = rlhf.trainer(), grpo(rlhf, rollout(LENGTHS)), [], []
    for rank in range(ranks):
        reads.clear()
        plan, batch = planned(trainer, command, rank, ranks)
        assert rows_of_tokens(reads) == [len(batch.rows)] * 2
        assert len(batch.sequences.input_ids) == int(batch.lengths[batch.rows].sum())
        rows.append(batch.rows)
        plans.append(plan)
    assert torch.cat(rows).sort().values.tolist() == list(range(len(LENGTHS)))  # each on one rank
    assert all(torch.equal(plan.micro_batch, plans[0].micro_batch) for plan in plans)
    assert (plans[0].minibatch == LEFT_OUT).nonzero()[:, 0].tolist() == list(DROPPED)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_a_rank_that_scores_reads_its_own_samples_only(rlhf: World, reads: list[Read], ranks: int) -> None:
    """All of them together hold each token once, where it is in the whole rollout."""
    trainer, table = rlhf.trainer(), rollout(LENGTHS)
    files = trainer.tables.files(trainer.store, {"rollout": rlhf.write("rollout", table)}, keeps=False)
    flat = torch.tensor(table["input_ids"].combine_chunks().flatten().to_numpy())
    micro = micro_batches(torch.tensor(LENGTHS), trainer.settings.trainer.micro_batch_tokens, "padded", ranks)
    places = []
    for rank in range(ranks):
        reads.clear()
        passes, batch = passes_and_batch(files, trainer.settings, rank, ranks)
        assert rows_of_tokens(reads) == [len(batch.rows)]
        assert [micro[rows].unique().tolist() for rows in passes] == [[n] for n in range(len(passes))]
        places.append(places_of_rank(passes, batch.lengths, ranks, rank))
        assert torch.equal(batch.sequences.input_ids, flat[places[-1]])
    assert torch.cat(places).sort().values.tolist() == list(range(sum(LENGTHS)))


def test_a_token_too_old_is_refused_in_a_sample_that_is_left_out(world: World) -> None:
    world.recipe = rlhf_recipe(rollout={"max_head_offpolicyness": 1})
    table = rollout(LENGTHS)
    versions = table["versions"].to_pylist()
    versions[DROPPED[1]][-1] = -2
    trainer, command = world.trainer(), grpo(world, with_column(table, "versions", versions))
    planned(trainer, command, 0, 2)
    with pytest.raises(UserError, match="2 versions older"):
        planned(trainer, command, 1, 2)
