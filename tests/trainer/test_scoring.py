"""The part of a batch that servers score."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.rows import LEAST_COMPARED
from areal_tasks.engines.trainer.scoring import MOST_OF_SAMPLE, read_part, scored_table
from areal_tasks.engines.trainer.tables import SharedTables
from areal_tasks.store.backend import open_store
from areal_tasks.store.shards import write_table
from areal_tasks.workflows import Prompt, Sample, samples_to_table

#: For each sample its turns: how many tokens were given, then generated.
Turns = list[list[tuple[int, int]]]
turns = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 150)), min_size=1, max_size=3), max_size=12)


TablesOf = Callable[[pa.Table], SharedTables]


@pytest.fixture(scope="module")
def tables_of(tmp_path_factory: pytest.TempPathFactory) -> TablesOf:
    """Writes a rollout, as the only rank reads it."""
    store, numbers = open_store(tmp_path_factory.mktemp("tables").as_uri()), itertools.count()

    def write(table: pa.Table) -> SharedTables:
        refs = {"rollout": write_table(store, f"run/{next(numbers)}", "rollout", table)}
        return SharedTables(Group(), Path("unused")).fetch(store, refs, keeps=False)

    return write


def rollout(samples: Turns) -> pa.Table:
    return samples_to_table([sample_of(number, turns) for number, turns in enumerate(samples)])


def sample_of(number: int, turns: list[tuple[int, int]]) -> Sample:
    mask = [False] + [kind for given, made in turns for kind in [False] * given + [True] * made]
    ids = [1000 * number + position for position in range(len(mask))]
    prompt = Prompt(0, number, 0, "", "", ids[:1])
    return Sample(prompt, 0, "", ids, mask, [0.0] * len(ids), [0] * len(ids), "stop", 0, "", 0.0)


@given(turns, st.integers(2, 400))
@settings(max_examples=60, deadline=None)
def test_it_is_the_beginnings_of_the_first_samples(tables_of: TablesOf, samples: Turns, most: int) -> None:
    table = rollout(samples)
    part = read_part(tables_of(table), most)
    rows = {row["sample_id"]: row for row in table.to_pylist()}
    scored = 0
    for name, ids, first in zip(part.sample_ids, part.input_ids, part.scored_from, strict=True):
        row, end = rows[name], len(ids)
        assert ids == row["input_ids"][:end] and 1 <= first < end <= most
        assert not any(row["loss_mask"][1:first]) and all(row["loss_mask"][first:end]), (
            "the first run of generated ones"
        )
        ended = end == len(row["input_ids"]) or not row["loss_mask"][end]
        assert end - first == MOST_OF_SAMPLE or end == most or ended, "as long as it may be"
        scored += end - first
    order = [row["sample_id"] for row in table.to_pylist()]
    assert part.sample_ids == [name for name in order if name in part.sample_ids]
    one_turn_each = all(len(turns) == 1 for turns in samples)
    if one_turn_each and most > 200:
        whole = sum(min(made, MOST_OF_SAMPLE) for [(_, made)] in samples)
        assert min(LEAST_COMPARED, whole) <= scored < LEAST_COMPARED + MOST_OF_SAMPLE


@given(turns)
@settings(max_examples=30, deadline=None)
def test_its_counted_tokens_are_those_that_are_scored(tables_of: TablesOf, samples: Turns) -> None:
    part = read_part(tables_of(rollout(samples)), 400)
    counted = part.sequences(torch.arange(len(part.sample_ids))).counted
    flat = torch.where(counted, torch.arange(len(counted), dtype=torch.float32), -1.0)
    rows = scored_table(part, 7, flat).to_pylist()
    assert [row["sample_id"] for row in rows] == part.sample_ids
    assert [score for row in rows for score in row["scores"]] == flat[counted].tolist()
    assert all(len(row["scores"]) == len(row["input_ids"]) - row["scored_from"] for row in rows)
    assert {row["version"] for row in rows} <= {7}
