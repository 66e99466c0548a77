"""Which prompts an iteration reads is a pure function of the run's seed and the group's number."""

from __future__ import annotations

import pyarrow as pa

from areal_tasks.data.tokenising import Example
from areal_tasks.stages.batch import batch_table
from areal_tasks.stages.rollout import PROMPT_COLUMNS, prompts_of_groups
from schemas.tables import PROMPTS, SFT_BATCH

ROWS = 7


def prompts() -> pa.Table:
    rows = [
        {"prompt_id": i, "prompt": f"p{i}", "answer": f"a{i}", "input_ids": [i, i], "num_tokens": 2}
        for i in range(ROWS)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS).select(PROMPT_COLUMNS)


def test_an_epoch_reads_every_prompt_once_and_the_next_in_another_order() -> None:
    found = prompts_of_groups(prompts(), range(2 * ROWS), seed=5)
    first, second = found[:ROWS], found[ROWS:]
    assert sorted(p.prompt_id for p in first) == sorted(p.prompt_id for p in second) == list(range(ROWS))
    assert [p.prompt_id for p in first] != [p.prompt_id for p in second]
    assert [p.epoch for p in found] == [0] * ROWS + [1] * ROWS
    assert [p.group_id for p in found] == list(range(2 * ROWS))


def test_a_group_reads_the_same_prompt_however_iterations_are_cut() -> None:
    whole = prompts_of_groups(prompts(), range(12), seed=5)
    parts = [p for start in range(0, 12, 3) for p in prompts_of_groups(prompts(), range(start, start + 3), seed=5)]
    assert whole == parts


def test_a_row_travels_whole() -> None:
    for found in prompts_of_groups(prompts(), range(3), seed=1):
        i = found.prompt_id
        assert (found.prompt, found.answer, found.input_ids) == (f"p{i}", f"a{i}", [i, i])


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(p.prompt_id for p in prompts_of_groups(prompts(), range(ROWS), seed=seed)) for seed in range(8)}
    assert len(orders) > 4


def example(i: int) -> Example:
    return Example(prompt_id=i, prompt=f"p{i}", completion=f"c{i}", input_ids=[1, 2, i], loss_mask=[False, True, True])


def test_a_batch_names_its_place_in_the_order_and_its_optimizer_step() -> None:
    table = batch_table(range(5, 11), ROWS, [example(i) for i in range(6)], batch_size=2)
    assert table.schema == SFT_BATCH
    assert table["sample_id"].to_pylist() == ["5", "6", "7", "8", "9", "10"]
    assert table["epoch"].to_pylist() == [0, 0, 1, 1, 1, 1]
    assert table["minibatch"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert table["num_tokens"].to_pylist() == [3] * 6
    assert table["completion"].to_pylist() == [f"c{i}" for i in range(6)]
