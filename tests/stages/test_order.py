"""Which prompts an iteration reads is a pure function of the run's seed and the group's number."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
from stage_driver import drive, store_in, tiny, tiny_sft

from areal_tasks.data.sampler import row_of_group
from areal_tasks.data.tokenising import Example
from areal_tasks.rollout.prompts import PROMPT_COLUMNS, prompt_of_group
from areal_tasks.stages.batch import batch_table
from areal_tasks.store import paths
from areal_tasks.store.commit import find_record
from areal_tasks.store.fork import Origin
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from areal_tasks.workflows import Prompt
from schemas.manifest import PROMPT_ORDER, RunRecord
from schemas.recipe.recipe import Recipe
from schemas.tables import PROMPTS, SFT_BATCH

ROWS = 7


def prompts() -> pa.Table:
    rows = [
        {"prompt_id": i, "prompt": f"p{i}", "answer": f"a{i}", "input_ids": [i, i], "num_tokens": 2}
        for i in range(ROWS)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS).select(PROMPT_COLUMNS)


def read(groups: range, seed: int) -> list[Prompt]:
    return [prompt_of_group(prompts(), group, seed, PROMPT_ORDER) for group in groups]


def test_an_epoch_reads_every_prompt_once_and_the_next_in_another_order() -> None:
    found = read(range(2 * ROWS), seed=5)
    first, second = found[:ROWS], found[ROWS:]
    assert sorted(p.prompt_id for p in first) == sorted(p.prompt_id for p in second) == list(range(ROWS))
    assert [p.prompt_id for p in first] != [p.prompt_id for p in second]
    assert [p.epoch for p in found] == [0] * ROWS + [1] * ROWS
    assert [p.group_id for p in found] == list(range(2 * ROWS))


def test_a_group_reads_the_same_prompt_however_iterations_are_cut() -> None:
    whole = read(range(12), seed=5)
    parts = [p for start in range(0, 12, 3) for p in read(range(start, start + 3), seed=5)]
    assert whole == parts


def test_a_row_travels_whole() -> None:
    for found in read(range(3), seed=1):
        i = found.prompt_id
        assert (found.prompt, found.answer, found.input_ids) == (f"p{i}", f"a{i}", [i, i])


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(p.prompt_id for p in read(range(ROWS), seed=seed)) for seed in range(8)}
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


# ── runs that were begun with the first order ───────────────────────────────────────────────────────────────────────

LIMIT = 8  # a data set so small that its first order was not uniform


def begun_before(folder: Path, name: str, flow: str, seed: int) -> None:
    """What a program that knew one order only has left of a run: its record, which names none."""
    here = open_run(store_in(folder), "now", tiny() if flow == "rlhf" else tiny_sft())
    record = json.loads(here.store.read(paths.run_record("now")))
    assert record.pop("order") == PROMPT_ORDER and record.pop("seal")
    body = json.dumps(record | {"schema_version": 2, "run": name, "seed": seed}, indent=1)
    seal = hashlib.sha256(body.encode()).hexdigest()
    here.store.create(paths.run_record(name), f'{{\n "seal": "{seal}",\n{body[2:]}'.encode())


def rows_read(run: Run, table: str) -> list[int]:
    """The rows that the run's groups or demonstrations were, in their order."""
    number = "group_id" if table == "rollout" else "sample_id::INT"
    query = f"SELECT DISTINCT {number} AS n, prompt_id FROM {table} ORDER BY n"
    return [row["prompt_id"] for row in run_sql(run.store, run.name, query).to_pylist()]


def in_order(order: int, count: int, recipe: Recipe) -> list[int]:
    return [row_of_group(group, LIMIT, recipe.seed, order) for group in range(count)]


def test_a_run_keeps_the_order_that_it_was_begun_with_and_so_does_its_child(tmp_path: Path) -> None:
    short = tiny(
        data={"limit": LIMIT}, evaluation={"every": 0, "limit": 0, "max_new_tokens": 256}, schedule={"iterations": 2}
    )
    begun_before(tmp_path, "old", "rlhf", short.seed)
    old, new = drive(tmp_path, "old", short), drive(tmp_path, "new", short)
    count = 2 * short.rollout.groups  # type: ignore[union-attr]
    first, second = in_order(1, count, short), in_order(2, count, short)
    assert first != second
    assert rows_read(old, "rollout") == first and rows_read(new, "rollout") == second
    child = drive(tmp_path, "child", short, origin=Origin("old", 1))
    assert rows_read(child, "rollout") == first
    record = find_record(child.store, paths.run_record("child"), RunRecord)
    assert record is not None and record.order == 1


def test_so_does_supervised_fine_tuning(tmp_path: Path) -> None:
    short = tiny_sft(data={"limit": LIMIT}, schedule={"iterations": 1})
    begun_before(tmp_path, "old", "sft", short.seed)
    old, new = drive(tmp_path, "old", short), drive(tmp_path, "new", short)
    assert rows_read(old, "batch") == in_order(1, 12, short) != rows_read(new, "batch") == in_order(2, 12, short)
