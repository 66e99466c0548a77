"""Each rank holds the tokens of its own samples only, to train or to score; all read what the plan depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
import torch
from rank_threads import on_ranks, tables_of_ranks
from trainer_builders import World, advantage, rlhf_recipe, rollout, with_column

from areal_tasks.data.batching import LEFT_OUT, micro_batches
from areal_tasks.engines.trainer.commands import Train
from areal_tasks.engines.trainer.plan import (
    Plan,
    make_plan,
    passes_of,
    passes_of_rank,
    plan_and_batch,
    plan_and_texts,
    rank_of_samples,
)
from areal_tasks.engines.trainer.rows import PLANNING, text_samples
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.tables import SharedTables
from schemas.errors import UserError
from schemas.manifest import TableRef

T = TypeVar("T")
LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]
DROPPED = (9, 10, 11)
Read = tuple[int, str, Sequence[str], int]


@pytest.fixture
def rlhf(world: World) -> World:
    world.recipe = rlhf_recipe()
    return world


def on_all(
    trainer: Trainer, refs: dict[str, TableRef], folder: Path, world: int, work: Callable[[SharedTables], T]
) -> list[T]:
    """What each of so many ranks makes of these tables."""
    fetched = tables_of_ranks(world, folder)
    return on_ranks(world, lambda rank: work(fetched[rank].fetch(trainer.store, refs, False)))


def grpo(world: World, table: pa.Table) -> Train:
    return world.train_command(0, {"rollout": table, "advantage": advantage(table, dropped=DROPPED)})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What is read from now on: by which rank, of which table, which columns, and how many rows it gets."""
    found: list[Read] = []
    read = SharedTables.read

    def recorded(self: SharedTables, columns: dict[str, Sequence[str]], *which: Any) -> dict[str, pa.Table]:
        tables = read(self, columns, *which)
        found.extend((self.group.rank, name, columns[name], table.num_rows) for name, table in tables.items())
        return tables

    monkeypatch.setattr(SharedTables, "read", recorded)
    return found


def rows_of_tokens(reads: list[Read], rank: int) -> list[int]:
    """Of how many samples a rank got more than what the plan depends on."""
    return [rows for by, name, columns, rows in reads if by == rank and columns != PLANNING[name]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_gets_tokens_of_its_own_samples_only(rlhf: World, reads: list[Read], tmp_path: Path, ranks: int) -> None:
    trainer, command = rlhf.trainer(), grpo(rlhf, rollout(LENGTHS))
    found = on_all(
        trainer, command.tables, tmp_path, ranks, lambda tables: plan_and_batch(command, trainer.settings, tables)
    )
    plans, batches = zip(*found, strict=True)
    for rank, batch in enumerate(batches):
        assert rows_of_tokens(reads, rank) == [len(batch.rows)] * 2
        assert len(batch.sequences.input_ids) == int(batch.lengths[batch.rows].sum())
    assert torch.cat([batch.rows for batch in batches]).sort().values.tolist() == list(range(len(LENGTHS)))
    assert all(torch.equal(plan.micro_batch, plans[0].micro_batch) for plan in plans)
    assert (plans[0].minibatch == LEFT_OUT).nonzero()[:, 0].tolist() == list(DROPPED)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_a_rank_that_scores_gets_its_own_samples_only(
    rlhf: World, reads: list[Read], tmp_path: Path, ranks: int
) -> None:
    """All of them together hold each token once."""
    trainer, table = rlhf.trainer(), rollout(LENGTHS)
    tokens = [torch.tensor(ids) for ids in table["input_ids"].to_pylist()]
    micro = micro_batches(torch.tensor(LENGTHS), trainer.settings.trainer.micro_batch_tokens, "padded", ranks)
    refs = {"rollout": rlhf.write("rollout", table)}
    found = on_all(trainer, refs, tmp_path, ranks, lambda tables: plan_and_texts(tables, trainer.settings))
    for rank, (plan, batch) in enumerate(found):
        assert rows_of_tokens(reads, rank) == [len(batch.rows)]
        assert torch.equal(plan.micro_batch, micro) and not plan.minibatch.any()
        assert batch.rows.tolist() == [row for row in range(len(LENGTHS)) if micro[row] % ranks == rank]
        assert batch.sequences.input_ids.tolist() == [int(t) for row in batch.rows for t in tokens[row]]


def test_a_token_too_old_is_refused_on_every_rank_in_a_sample_that_is_left_out(world: World, tmp_path: Path) -> None:
    world.recipe = rlhf_recipe(rollout={"max_head_offpolicyness": 1})
    table = rollout(LENGTHS)
    versions = table["versions"].to_pylist()
    versions[DROPPED[1]][-1] = -2
    trainer, command = world.trainer(), grpo(world, with_column(table, "versions", versions))

    def refused(tables: SharedTables) -> None:
        with pytest.raises(UserError, match="2 versions older"):
            plan_and_batch(command, trainer.settings, tables)

    on_all(trainer, command.tables, tmp_path, 2, refused)


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_the_rank_that_reads_a_sample_is_the_one_that_trains_on_it(rlhf: World, ranks: int) -> None:
    """What none trains on is divided evenly."""
    random = torch.Generator().manual_seed(ranks)
    lengths = torch.randint(1, 30, (300,), generator=random)
    kept = torch.rand(300, generator=random) < 0.8
    samples = replace(text_samples(rollout(lengths.tolist())), kept=kept)
    plan = make_plan(samples, rlhf.trainer().settings, 0, ranks)
    found = rank_of_samples(plan, ranks)
    numbers = range(int(plan.minibatch.max()) + 1)
    for rank in range(ranks):
        mine = [rows for number in numbers for rows in passes_of_rank(plan, number, rank, ranks)]
        assert torch.equal((found[kept] == rank).nonzero(), torch.isin(kept.nonzero()[:, 0], torch.cat(mine)).nonzero())
    counts = torch.bincount(found[plan.minibatch == LEFT_OUT], minlength=ranks)
    assert counts.max() - counts.min() <= 1


def test_the_passes_of_a_minibatch_hold_its_samples_in_ascending_order(rlhf: World) -> None:
    """Ranks take the passes in turn; where that leaves some without one, theirs is empty."""
    plan = make_plan(text_samples(rollout([5, 9, 1, 7, 3] * 20)), rlhf.trainer().settings, 0)
    for number, ranks in itertools.product(range(int(plan.minibatch.max()) + 1), (1, 4, 7)):
        micro = plan.micro_batch[plan.minibatch == number].unique().tolist()
        wanted = [((plan.minibatch == number) & (plan.micro_batch == each)).nonzero()[:, 0].tolist() for each in micro]
        of_ranks = [passes_of_rank(plan, number, rank, ranks) for rank in range(ranks)]
        found = [rows.tolist() for turn in zip(*of_ranks, strict=True) for rows in turn]
        assert len(wanted) == passes_of(plan, number) > len(found) - ranks
        assert found == wanted + [[]] * (len(found) - len(wanted))


def test_a_minibatch_without_samples_has_no_pass() -> None:
    plan = Plan(torch.tensor([0, LEFT_OUT]), torch.tensor([0, LEFT_OUT]))
    assert passes_of(plan, 1) == 0 and passes_of_rank(plan, 1, 0, 2) == []
