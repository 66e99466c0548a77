"""The ranks of a trainer fetch and decode each file of a table once among them, and each gets its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_threads import on_ranks, tables_of_ranks
from trainer_builders import advantage, rollout
from two_ranks import FarAway

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.tables import SharedTables
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.shards import read_table, write_table
from schemas.errors import UserError
from schemas.manifest import TableRef
from schemas.tables import ADVANTAGE, ROLLOUT

COLUMNS = {"rollout": ROLLOUT.names, "advantage": ADVANTAGE.names}
Refs = dict[str, TableRef]


class Ranks:
    """A store far from so many ranks, and what each has fetched of it."""

    def __init__(self, folder: Path, world: int) -> None:
        self.store = open_store((folder / "store").as_uri())
        self.folder = folder / "fetched"
        self.far = [FarAway(self.store) for _ in range(world)]
        self.ranks = tables_of_ranks(world, self.folder)

    def read(self, refs: Refs, keeps: bool = False, **which: Any) -> list[Any]:
        """The tables that each rank reads, or the error it raises."""

        def of(rank: int) -> Any:
            try:
                tables = self.ranks[rank].fetch(self.far[rank], refs, keeps)
                return tables.read({name: COLUMNS[name] for name in refs}, **which)
            except UserError as error:
                return error

        return on_ranks(len(self.ranks), of)

    def fetched(self) -> list[str]:
        """The files that were fetched since the last call, by any rank."""
        found = sorted(name for far in self.far for name in far.fetched)
        for far in self.far:
            far.fetched.clear()
        return found

    def kept(self) -> list[Path]:
        return sorted(self.folder.rglob("*.parquet"))


@pytest.fixture(params=[2, 3])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Ranks:
    return Ranks(tmp_path, request.param)


def _written(store: Store) -> Refs:
    """Five files of unequal size of a rollout, and two of its advantages."""
    table = rollout([9, 4, 13, 6, 11, 3, 8, 5, 10])
    made = {"rollout": (table, 2), "advantage": (advantage(table), 5)}
    return {name: write_table(store, "made", name, of, max_rows=rows) for name, (of, rows) in made.items()}


def _names(*refs: TableRef) -> list[str]:
    return sorted(Path(shard.path).name for ref in refs for shard in ref.shards)


def _check(ranks: Ranks, refs: Refs, found: list[Any]) -> None:
    """Every rank has read all that is in the store."""
    assert found == [{name: read_table(ranks.store, ref) for name, ref in refs.items()}] * len(ranks.ranks)


def test_the_store_gives_each_file_once_and_every_rank_reads_all_rows(ranks: Ranks) -> None:
    refs = _written(ranks.store)
    _check(ranks, refs, ranks.read(refs))
    assert ranks.fetched() == _names(*refs.values())


lengths = st.lists(st.integers(0, 20), min_size=1, max_size=30)
ROWS_A_FILE = st.integers(1, 12)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=lengths, rows=ROWS_A_FILE, others=ROWS_A_FILE, seed=st.integers(0, 2**32 - 1))
def test_each_rank_gets_the_rows_of_a_plain_read_that_are_for_it(
    ranks: Ranks, lengths: list[int], rows: int, others: int, seed: int
) -> None:
    """Whatever the files, and however samples, of which some are not asked for, are spread over ranks."""
    table, random = rollout(lengths), np.random.default_rng(seed)
    moved = advantage(table).take(pa.array(random.permutation(len(lengths))))
    refs = {
        "rollout": write_table(ranks.store, f"made-{random.bytes(8).hex()}", "rollout", table, max_rows=rows),
        "advantage": write_table(ranks.store, f"made-{random.bytes(8).hex()}", "advantage", moved, max_rows=others),
    }
    whole = {name: read_table(ranks.store, ref) for name, ref in refs.items()}
    ids = table["sample_id"].combine_chunks().take(pa.array(random.permutation(len(lengths))[: len(lengths) // 2 + 1]))
    owners = torch.tensor(random.integers(0, len(ranks.ranks), len(ids)))
    for rank, found in enumerate(ranks.read(refs, ids=ids, ranks=owners)):
        own = ids.filter(pa.array((owners == rank).numpy()))
        assert found == {name: of.filter(pc.is_in(of["sample_id"], value_set=own)) for name, of in whole.items()}
    wanted = {name: of.filter(pc.is_in(of["sample_id"], value_set=ids)) for name, of in whole.items()}
    assert ranks.read(refs, ids=ids) == [wanted] * len(ranks.ranks)


def test_what_is_kept_is_not_fetched_again_and_nothing_else_is_kept(ranks: Ranks) -> None:
    refs = _written(ranks.store)
    ranks.read({"rollout": refs["rollout"]}, keeps=True)
    ranks.fetched()
    both = {name: refs[name] for name in ("advantage", "rollout")}
    _check(ranks, both, ranks.read(both))
    assert ranks.fetched() == _names(refs["advantage"])
    ranks.read({"advantage": refs["advantage"]})
    assert sorted(file.stem for file in ranks.kept()) == sorted(s.sha256 for s in refs["advantage"].shards)


def test_a_rank_clears_what_it_has_fetched_itself_unless_it_is_kept(ranks: Ranks) -> None:
    refs, last = _written(ranks.store), ranks.ranks[-1]
    ranks.read(refs, keeps=True)
    before = ranks.kept()
    last.clear()
    assert ranks.kept() == before
    ranks.read(refs)
    last.clear()
    assert ranks.kept() == [file for file in before if file.parent != last.folder]


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip_a_bit(file: Path) -> None:
    good = file.read_bytes()
    file.write_bytes(good[:50] + bytes([good[50] ^ 1]) + good[51:])


@pytest.mark.parametrize("harm", [Path.unlink, _cut_short, _flip_a_bit])
def test_a_kept_file_that_is_lost_or_damaged_is_fetched_again(ranks: Ranks, harm: Callable[[Path], None]) -> None:
    refs = _written(ranks.store)
    ranks.read(refs, keeps=True)
    ranks.fetched()
    harm(ranks.kept()[3])
    _check(ranks, refs, ranks.read(refs))
    assert len(ranks.fetched()) == 1


def test_a_damaged_file_of_the_store_is_named_on_every_rank(ranks: Ranks) -> None:
    refs = _written(ranks.store)
    path = ranks.store.local(refs["rollout"].shards[1].path)
    assert path is not None
    _flip_a_bit(path)
    found = ranks.read(refs)
    assert {type(error) for error in found} == {UserError} and all(path.name in str(error) for error in found)
    _flip_a_bit(path)
    _check(ranks, refs, ranks.read(refs))


def test_a_file_that_is_damaged_after_it_was_verified_is_named_on_every_rank(ranks: Ranks) -> None:
    refs = _written(ranks.store)
    world = len(ranks.ranks)
    tables = on_ranks(world, lambda rank: ranks.ranks[rank].fetch(ranks.far[rank], refs, False))
    harmed = tables[-1].files[0]
    _flip_a_bit(harmed)

    def error(rank: int) -> str:
        with pytest.raises(UserError) as caught:
            tables[rank].read(COLUMNS)
        return str(caught.value)

    assert all(str(harmed) in text for text in on_ranks(world, error))


def test_files_of_equal_content_are_each_read(ranks: Ranks) -> None:
    """They are one file in a rank's folder."""
    table = rollout([9])
    refs = {"rollout": write_table(ranks.store, "made", "rollout", pa.concat_tables([table] * 7), max_rows=1)}
    _check(ranks, refs, ranks.read(refs))


def test_a_rank_alone_exchanges_nothing(tmp_path: Path) -> None:
    """It has no process group that it could do it with."""
    store = open_store(tmp_path.as_uri())
    refs = _written(store)
    tables = SharedTables(Group(), tmp_path / "fetched").fetch(store, refs, keeps=False)
    ids = pa.array(["1-0", "0-1"])
    for table in tables.read(COLUMNS, ids, torch.zeros(2, dtype=torch.int64)).values():
        assert table["sample_id"].to_pylist() == ["0-1", "1-0"]
    assert not (tmp_path / "fetched").exists()
